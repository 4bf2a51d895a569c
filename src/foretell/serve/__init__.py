"""`foretell serve`: an OpenAI-compatible HTTP server on the engine (extra `serve`)."""
