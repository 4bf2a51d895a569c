"""Roofline analysis: predicted cost of forward passes on given hardware, and predicted gain of decoding methods.

The roofline model (Williams et al., 2009) applied to language models as in "LLM Inference Unveiled" (arXiv 2402.16363),
with the accounting corrected and speculation added. It needs a model's configuration, never its weights.
"""
