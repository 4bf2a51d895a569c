"""Between characters and tokens: tokenizers, chat templates, and incremental detokenization."""
