"""Sweeps: one replay for each of many designs, as rows of a table. A design is one value for each axis."""
