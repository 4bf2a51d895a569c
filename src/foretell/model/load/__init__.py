"""Model files: GGUF and safetensors, checkpoints that can be read again, and models run by transformers."""
