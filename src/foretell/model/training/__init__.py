"""Differentiable forward passes over whole sequences, for training."""
