"""Trained speculators: networks, checkpoints, the formats of other projects, installed packages, and export."""
