"""Matrices as checkpoints store them, and their rotation."""
