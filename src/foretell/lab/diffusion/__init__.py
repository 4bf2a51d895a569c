"""Decoding with masked diffusion language models: published ones, and models adapted by `foretell train`."""
