"""Training of speculators: data from the target itself, features, losses, one loop for all."""
