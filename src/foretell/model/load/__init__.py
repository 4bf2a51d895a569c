"""Loading models: GGUF and safetensors checkpoints, and models of the transformers library."""
