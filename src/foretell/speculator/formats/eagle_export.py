"""Writes EAGLE checkpoints for SafeAILab's code, SGLang, the `speculators` library and vLLM."""

from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.speculator.formats.base import (
    ExportFormat,
    Verifier,
    dtype_name,
    rope_config,
    write_checkpoint,
)
from foretell.speculator.formats.eagle import FLAGS, tensor_sources
from foretell.speculator.formats.layers import refuse_parts_of_layers
from foretell.speculator.network.base import Speculator, last_undrafted
from foretell.speculator.network.cached_layers import CachedLayersConfig
from foretell.speculator.network.dflash import DFlash
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleConfig, EagleNetwork
from foretell.speculator.network.p_eagle import PEagle
from foretell.speculator.network.pack import shallow_copy

_PROPOSED = 5
"""Tokens of a draft that the configuration of an EAGLE-3 speculator proposes."""
E = TypeVar("E", bound=Eagle3)
_MOST_DISTANCE = 0.3
"""Largest distance of a fitted state from the state after the final norm, relative to that."""


def weights(network: EagleNetwork, always_embedding: bool = False) -> dict[str, torch.Tensor]:
    """The tensors under their published names, the first layer as `layers.0`."""
    state, out = network.state_dict(), dict[str, torch.Tensor]()
    for ours, part in tensor_sources(network.config).items():
        out |= dict(zip(part.names, state[ours].split(part.rows), strict=True))
    every = torch.arange(network.target_info.vocab, device=out["fc.weight"].device)
    embedding = network.embed(every)
    # Where there is none, other engines use the target's, unscaled.
    is_target_s = torch.equal(embedding, network.get_buffer("_embedding").to(embedding.dtype))
    if always_embedding or network.embedding is not None or not is_target_s:
        out["embed_tokens.weight"] = embedding
    return out


def vocabulary(network: Speculator, always_maps: bool) -> dict[str, torch.Tensor]:
    """The output matrix, and offsets (`d2t`) and mask (`t2d`) of a draft vocabulary."""
    out = {"lm_head.weight": network.lm_head.to(network.dtype)}
    if network.token_of is not None or always_maps:
        tokens = torch.arange(network.target_info.vocab) if network.token_of is None else network.token_of.cpu()
        out["d2t"] = tokens - torch.arange(len(tokens))
        out["t2d"] = torch.zeros(network.target_info.vocab, dtype=torch.bool).index_fill(0, tokens, True)
    return out


def layer_config(c: CachedLayersConfig, dtype: str) -> dict[str, Any]:
    """The layer as a transformers configuration."""
    out: dict[str, Any] = {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "hidden_size": c.target.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.target.vocab,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        **rope_config(c.rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    if c.window:
        types = ["sliding_attention" if c.window_of(i) else "full_attention" for i in range(c.layers)]
        out |= {"layer_types": types, "sliding_window": c.window, "use_sliding_window": True}
    return out


def _norms(c: EagleConfig) -> dict[str, bool]:
    """Options of EAGLE-3, all of them: the default of `norm_before_residual` is true in vLLM and false in
    `speculators`.
    """
    return {name: c.model_dump()[name] for name in FLAGS}


def before_final_norm(network: E, verifier: Verifier) -> E:
    """An EAGLE-3 that reads the output of the target's last block where `network` reads the state after the final norm,
    which other engines do not give; `network` itself where it does not, or where this cannot be done.

    Both states have one direction up to a factor per dimension, which is fitted along the verifier's texts and becomes
    part of the state's own norm (`fc_norm`).

    Raises:
        ValueError: the verifier's final norm is no RMS norm, so that no such factors lead from one to the other.
    """
    c, n = network.config, network.target_info.layers
    if n + 1 not in c.recorded_layers or n in c.recorded_layers or not c.fc_norm or verifier.states is None:
        return network
    place = c.recorded_layers.index(n + 1)
    before, after = (F.rms_norm(x.double(), x.shape[-1:], eps=c.norm_eps) for x in verifier.states((n, n + 1)))
    factor = (before * after).sum(0) / before.square().sum(0).clamp_min(1e-12)
    if float((before * factor - after).norm() / after.norm()) > _MOST_DISTANCE:
        raise ValueError(
            f"the speculator reads the state after the final norm of {verifier.name}, which is no RMS norm, and no "
            "engine gives that state; train one that reads other layers (--set hidden_layers=2,15,27) to export it"
        )
    out = shallow_copy(network)
    assert out.fc_norm is not None
    out.config = c.model_copy(update={"hidden_layers": tuple(n if t == n + 1 else t for t in c.recorded_layers)})
    scale = out.fc_norm[place].get_parameter("weight").detach()
    out.fc_norm[place].register_parameter("weight", nn.Parameter(scale * factor.to(scale)))
    if isinstance(out, PEagle):
        # Of the mask's state the direction stays; its length after the norm is up to the norm. No factor is zero then.
        masks = out.mask_states.detach().clone().view(-1, len(factor))
        masks[place] *= (factor / (factor.square() + 1e-3)).to(masks)
        out.register_parameter("mask_states", nn.Parameter(masks.flatten()))
    return out


def check_exported(network: EagleNetwork, format_name: str) -> None:
    """Refuse a network with a part that the format does not support.

    Raises:
        ValueError: it has one.
    """
    c = network.config
    eagle3 = c.kind != "eagle"
    recorded, most = [t for t in c.recorded_layers if t <= c.target.layers], c.target.layers + 1
    hidden_layers = f" (--set hidden_layers={','.join(map(str, recorded))})"
    unsupported = (
        ("biases of queries, keys and values", eagle3 and c.qkv_bias, ""),
        ("a bias of the fused features", eagle3 and c.fc_bias is True, ""),
        ("the target's state after its final norm", eagle3 and most in c.recorded_layers, hidden_layers),
        ("an output matrix of its own", not eagle3 and c.own_head, ""),
    )
    refuse_parts_of_layers(network, format_name, unsupported)


def library_frame(verifier: Verifier, kind: str, architecture: str, proposed: int) -> dict[str, Any]:
    """What all configurations of the `speculators` library begin with; `proposed`: tokens of a draft."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": proposed, "verifier_accept_k": 1}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier.name, "architectures": verifier.architectures},
        },
        "target_hidden_size": None,
    }


def mask_token(network: PEagle | DFlash) -> int:
    """The mask's token, or the one whose row a learned mask takes."""
    own = network.config.mask_token
    return last_undrafted(network.token_of, network.target_info.vocab) if own is None else own


def library_config(
    network: EagleNetwork, verifier: Verifier, kind: str, architecture: str, proposed: int
) -> dict[str, Any]:
    """The configuration of the `speculators` library; `proposed`: tokens of a draft."""
    c = network.config
    return {
        **library_frame(verifier, kind, architecture, proposed),
        # vLLM reads the number of hidden states, and of P-EAGLE these norms, from the layer's configuration only.
        "transformer_layer_config": {
            **layer_config(c, dtype_name(network)),
            "num_aux_hidden_states": len(c.recorded_layers),
            **{name: True for name in ("fc_norm", "norm_output") if getattr(c, name)},
        },
        "draft_vocab_size": c.draft_vocab or c.target.vocab,
        **_norms(c),
        "eagle_aux_hidden_state_layer_ids": list(c.recorded_layers),
        "embed_requires_grad": False,
        "torch_dtype": dtype_name(network),
    }


def _write_speculators(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, Eagle3)
    network = before_final_norm(network, verifier)
    check_exported(network, "speculators")
    layout = library_config(network, verifier, "eagle3", "Eagle3Speculator", _PROPOSED)
    write_checkpoint(folder, layout, weights(network) | vocabulary(network, always_maps=False))


def _write_eagle3(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, Eagle3)
    network = before_final_norm(network, verifier)
    check_exported(network, "eagle3")
    c = network.config
    if c.layers > 1:
        raise ValueError(
            f"the format eagle3 has one layer, and this speculator has {c.layers}; use --format speculators"
        )
    layout = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(c, dtype_name(network)),
        "base_model_name_or_path": verifier.name,
        "draft_vocab_size": c.draft_vocab or c.target.vocab,
        **_norms(c),
        # vLLM counts the input of a block, SGLang and SpecForge the output of the previous block.
        "eagle_aux_hidden_state_layer_ids": list(c.recorded_layers),
        "num_aux_hidden_states": len(c.recorded_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [hidden_layer - 1 for hidden_layer in c.recorded_layers],
        },
    }
    tensors = {n.replace("layers.0.", "midlayer."): t for n, t in weights(network).items()}
    write_checkpoint(folder, layout, tensors | vocabulary(network, always_maps=True))


def _write_eagle1(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, Eagle1)
    check_exported(network, "eagle")
    c = network.config
    layout = {
        "architectures": verifier.architectures or ["LlamaForCausalLM"],
        **layer_config(c, dtype_name(network)),
        "base_model_name_or_path": verifier.name,
        "bias": network.fc.bias is not None,
        "qkv_bias": c.qkv_bias,
    }
    write_checkpoint(folder, layout, weights(network, always_embedding=True))


TO_SPECULATORS = ExportFormat("speculators", "eagle3", _write_speculators)
TO_EAGLE3 = ExportFormat("eagle3", "eagle3", _write_eagle3)
TO_EAGLE1 = ExportFormat("eagle", "eagle", _write_eagle1)
