"""What every part shares: token trees, the context of a step, sampling parameters and random numbers."""
