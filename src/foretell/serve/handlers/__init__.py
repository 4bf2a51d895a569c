"""HTTP handlers, one file per group of paths."""
