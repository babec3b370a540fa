"""What a machine takes for each thing that a run does, one concept a file."""
