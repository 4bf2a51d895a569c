"""The price list of cheaper passes: what every lossy way changes, what it gains, and what was predicted."""
