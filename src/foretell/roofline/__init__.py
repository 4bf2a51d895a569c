"""Predict before you run: what a pass costs on given hardware, and what each decoding method will gain there.

The roofline model (Williams et al., 2009) applied to language models as in "LLM Inference Unveiled" (arXiv 2402.16363),
with the accounting corrected and speculation added. It needs a model's configuration, never its weights.
"""
