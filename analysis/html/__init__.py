"""Pages in HTML that hold everything they show, to be sent to somebody and opened without a network."""
