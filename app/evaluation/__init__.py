"""How good the answers are: `coread eval`, over the product's own path from a question to its answer."""
