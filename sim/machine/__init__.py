"""The machine that a run is on: what it takes for every operation."""
