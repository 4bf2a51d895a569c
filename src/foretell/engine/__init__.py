"""The engine: requests, one loop for every method, and the statistics of a request."""
