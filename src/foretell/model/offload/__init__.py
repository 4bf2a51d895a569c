"""Models larger than memory: which blocks, experts and neurons stay in it."""
