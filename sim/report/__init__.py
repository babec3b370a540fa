"""What a run gave, for people and for programs."""
