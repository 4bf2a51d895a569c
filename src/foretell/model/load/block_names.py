"""Names of the modules of a block in checkpoints, by architecture."""

from dataclasses import dataclass

from foretell.model.config.model import ModelConfig


@dataclass(frozen=True)
class BlockNames:
    """Names of the modules of a block in its checkpoint."""

    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    state: str = "mamba"
    """Of Mamba-2."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    """The same as `gate`: one matrix holds the rows of both, or there is no gate."""
    down: str = "mlp.down_proj"
    final_norm: str = "model.norm"


_LFM2 = BlockNames(
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    final_norm="model.embedding_norm",
)
_GRANITE_HYBRID = BlockNames(
    gate="shared_mlp.input_linear", up="shared_mlp.input_linear", down="shared_mlp.output_linear"
)
_NEMOTRON = BlockNames(
    attention_norm="norm",
    mlp_norm="norm",
    attention="mixer",
    state="mixer",
    output="mixer.o_proj",
    gate="mixer.up_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    final_norm="model.norm_f",
)
_LLAMA4 = BlockNames(gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj")
_NAMES = {"lfm2": _LFM2, "granitemoehybrid": _GRANITE_HYBRID, "nemotron_h": _NEMOTRON, "llama4_text": _LLAMA4}
"""By architecture, where they are not those of Llama."""


def block_names(config: ModelConfig) -> BlockNames:
    """Names of the modules of a block in a checkpoint of this architecture."""
    return _NAMES.get(config.architecture, BlockNames())
