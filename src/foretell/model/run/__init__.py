"""Networks with their caches: what the engine passes token trees through."""
