"""Bodies of requests and answers, as pydantic models: what is parsed, validated and documented."""
