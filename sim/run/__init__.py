"""One run: settled and checked once, then executed."""
