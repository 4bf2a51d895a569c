"""Kernels for GPUs in Triton: attention, writing of pages, sampling and acceptance. Nothing here imports it alone."""
