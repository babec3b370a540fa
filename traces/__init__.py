"""Record and read routing traces of Mixture-of-Experts models."""
