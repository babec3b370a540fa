"""Generate text with a model whose experts are offloaded."""
