"""Eviction that knows the path."""
