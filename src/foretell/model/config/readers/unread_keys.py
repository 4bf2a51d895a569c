"""Keys of published configurations that are not read: they change no prediction, or are errors."""

from collections.abc import Collection

from foretell.utils.validation import Fields

_SAID_BY_TENSORS = frozenset({
    "attention_bias", "tie_word_embeddings", "bias", "qkv_bias", "draft_vocab_size", "truncated_vocab_size",
    "num_aux_hidden_states", "num_eagle_features", "enable_confidence_head",
})  # fmt: skip
"""What the names and shapes of the tensors say, too; they decide."""
_WITHOUT_EFFECT = _SAID_BY_TENSORS | frozenset({
    # Names, versions and how the weights were stored or trained.
    "_name_or_path", "architectures", "auto_map", "base_model_name_or_path", "target_model_name_or_path",
    "transformers_version", "dtype", "torch_dtype", "quantization_config", "compression_config", "quantization",
    "initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp", "confidence_head_alpha",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    # What transformers keeps in every configuration.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "use_cache",
    "chunk_size_feed_forward", "id2label", "label2id", "is_decoder", "is_encoder_decoder", "problem_type",
    "return_dict", "output_attentions", "output_hidden_states", "add_cross_attention",
    "cross_attention_hidden_size", "finetuning_task", "prefix", "pruned_heads", "task_specific_params",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "torchscript", "use_bfloat16",
    # Options of its generation, which drafting does not use.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
    "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
    "typical_p",
})  # fmt: skip


def refuse_other_keys(fields: Fields, *known: Collection[str]) -> None:
    """Refuse a key that is neither known nor without effect; one that is null counts as missing.

    Raises:
        ValueError: there is one; it is named.
    """
    names = _WITHOUT_EFFECT.union(*known)
    other = next((key for key, value in fields.raw.items() if value is not None and key not in names), None)
    if other is not None:
        wanted = "left out: this key is not known here, and may say that the speculator drafts in another way"
        raise fields.wrong(other, wanted, fields.raw[other])
