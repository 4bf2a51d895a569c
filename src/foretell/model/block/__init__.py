"""The parts of a decoder block in torch: the reference of the CPU kernels."""
