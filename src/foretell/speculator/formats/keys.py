"""Which keys of published configurations are known: those that are read, and those that change no prediction."""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.utils.validation import Fields

LAYER = frozenset({
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "norm_eps", "layer_norm_epsilon",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "hidden_act", "hidden_activation",
    "mlp_bias", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "target_hidden_size",
})  # fmt: skip
"""What describes decoder layers."""
IN_LAYER = ("fc_norm", "norm_output")
"""Options of EAGLE-3 that vLLM reads of P-EAGLE beside its layers."""
LIBRARY = frozenset({
    "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "target_hidden_size", "embed_requires_grad", "model_type", "has_no_defaults_at_init", "is_composition",
    "base_config_key", "sub_configs", "attribute_map", "keys_to_ignore_at_inference", "base_model_tp_plan",
    "base_model_pp_plan", "base_model_ep_plan",
})  # fmt: skip
"""What checkpoints of the `speculators` library have; those after `embed_requires_grad` by its earlier releases."""
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


def refuse_other_library_keys(fields: Fields, layer: Mapping[str, Any], *known: Collection[str]) -> None:
    """The same in a checkpoint of the `speculators` library, in its parts, too.

    Raises:
        ValueError: there is one; it is named.
    """
    refuse_other_keys(fields, LIBRARY, *known)
    refuse_other_keys(Fields(layer, fields.source, "transformer_layer_config."), LAYER, IN_LAYER)
    about = ("algorithm", "default_proposal_method", "proposal_methods", "verifier")
    refuse_other_keys(fields.fields("speculators_config"), about)
