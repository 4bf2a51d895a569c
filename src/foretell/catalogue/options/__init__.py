"""The options of the methods: one pydantic model per method, with the default values.

Options have the names of vLLM's `speculative_config` where it has them, else those of SGLang (trees), TensorRT-LLM
(lookahead), Medusa (typical acceptance) or Hugging Face (schedules). Other names are aliases.
"""
