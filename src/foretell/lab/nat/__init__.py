"""Sequence-to-sequence models that do not decode from left to right, and the autoregressive model beside them."""
