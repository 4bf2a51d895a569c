"""The engine: requests, the decoding loop of all methods, and statistics per request."""
