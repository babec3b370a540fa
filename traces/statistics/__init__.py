"""What traces tell of a model's routing."""
