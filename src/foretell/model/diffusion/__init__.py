"""Masked diffusion language models: their checkpoints, and passes whose attention is not causal."""
