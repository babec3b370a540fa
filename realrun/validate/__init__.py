"""How far the simulator is from the machine."""
