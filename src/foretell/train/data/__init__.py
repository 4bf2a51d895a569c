"""What speculators learn from: texts, their order, batches, and the hidden states of the target."""
