"""Which keys of published speculators are known beside those that change no prediction."""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.model.config.readers.unread_keys import refuse_other_keys
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
_PROPOSAL = ("proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance")
"""How the library drafts and accepts; of these only the number of tokens is read."""
_VERIFIER = (
    "name_or_path", "architectures", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip
"""What the library says of the target; after the first two by its earlier releases."""


def refuse_other_library_keys(fields: Fields, layer: Mapping[str, Any], *known: Collection[str]) -> None:
    """The same in a checkpoint of the `speculators` library, in its parts, too.

    Raises:
        ValueError: there is one; it is named.
    """
    refuse_other_keys(fields, LIBRARY, *known)
    refuse_other_keys(Fields(layer, fields.source, "transformer_layer_config."), LAYER, IN_LAYER)
    own = fields.fields("speculators_config")
    refuse_other_keys(own, ("algorithm", "default_proposal_method", "proposal_methods", "verifier"))
    refuse_other_keys(own.fields("verifier"), _VERIFIER)
    for proposal in own.objects("proposal_methods"):
        refuse_other_keys(proposal, _PROPOSAL)
