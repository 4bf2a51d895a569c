"""Cheaper passes compared: what every lossy variant changes, what it gains, and what was predicted."""
