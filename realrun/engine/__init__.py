"""Replay on a device: the simulator's decisions, executed with streams and events."""
