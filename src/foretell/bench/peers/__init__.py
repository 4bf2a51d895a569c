"""Other runtimes, measured in the same run with the same weights."""
