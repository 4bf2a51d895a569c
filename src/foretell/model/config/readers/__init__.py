"""Readers of model configurations: Hugging Face `config.json` files and GGUF metadata."""
