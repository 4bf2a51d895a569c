"""Next-token distributions: processed by sampling parameters, their divergences, and their most probable tokens."""
