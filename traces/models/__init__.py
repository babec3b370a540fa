"""The model whose experts are offloaded: layers, experts and bytes."""
