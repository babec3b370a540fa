"""What the path of tokens through the experts tells of the experts that are needed next."""
