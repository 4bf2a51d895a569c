"""What all rooms share: token trees, the context of a step, sampling parameters and random numbers."""
