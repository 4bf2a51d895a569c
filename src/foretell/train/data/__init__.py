"""Training data: data sets of tokens, their generation, batches, and the target's hidden states."""
