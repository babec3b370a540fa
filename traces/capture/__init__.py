"""Record what the routers of a real model decide."""
