"""The target: its configuration, its decoder, its cache, and the runner that binds them."""
