"""Decoding with masked diffusion language models: LLaDA, Dream, SDAR, and models adapted by `foretell train`."""
