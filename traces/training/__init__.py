"""Train small real models with the routing topology of large ones."""
