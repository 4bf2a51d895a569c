"""The mixture of experts of a Hugging Face `config.json`."""

from foretell.model.config.model import MoEConfig
from foretell.model.config.readers.architectures import GRANITE_EXPERTS, LATENT_KINDS, SHARED_EXPERT
from foretell.model.config.rope import RopeConfig as RopeConfig
from foretell.utils.validation import Fields


def _deepseek_experts(read: Fields, kind: str, layers: int) -> MoEConfig:
    """The mixture of experts of DeepSeek-V2 (softmax), and of DeepSeek-V3 and GLM (sigmoid, a bias that selects)."""
    softmax = kind == "deepseek_v2"
    method = read.text("topk_method", default="greedy" if softmax else "noaux_tc")
    known = ("greedy", "group_limited_greedy") if softmax else ("noaux_tc",)
    for name, found, allowed in (
        ("topk_method", method, known),
        ("scoring_func", read.text("scoring_func", default=""), ("", "softmax" if softmax else "sigmoid")),
        ("moe_layer_freq", read.integer("moe_layer_freq", default=1), (1,)),
        ("norm_topk_prob", softmax and read.flag("norm_topk_prob", default=False), (False,)),
    ):
        if found not in allowed:
            raise read.wrong(name, f"{' or '.join(str(a) for a in allowed if a != '')} for {kind}", found)
    count, ffn = read.integer("n_routed_experts", least=1), read.integer("moe_intermediate_size", least=1)
    grouped = method != "greedy"
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=ffn,
        shared_ffn=read.integer("n_shared_experts", default=0) * ffn,
        renormalize=not softmax and read.flag("norm_topk_prob", default=True),
        layers=_sparse_layers(read, kind, layers),
        scoring="softmax" if softmax else "sigmoid",
        selection_bias=not softmax,
        groups=read.integer("n_group", default=1, least=1) if grouped else 1,
        active_groups=read.integer("topk_group", default=1, least=1) if grouped else 1,
        ranked_by=1 if softmax else 2,
        scale=read.number("routed_scaling_factor", default=1.0),
    )


def _sparse_layers(read: Fields, kind: str, layers: int) -> tuple[int, ...]:
    types = read.texts("mlp_layer_types") if kind == "glm4_moe_lite" else ()
    if types:
        if len(types) != layers or not set(types) <= {"dense", "sparse"}:
            raise read.wrong("mlp_layer_types", f"{layers} of dense or sparse", list(types))
        return tuple(i for i, each in enumerate(types) if each == "sparse")
    dense = 1 if kind == "glm4_moe_lite" else read.integer("first_k_dense_replace", default=0)
    return tuple(range(dense, layers))


def read_experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    """The mixture of experts of an architecture; None: it has none."""
    if kind in LATENT_KINDS or kind == "glm4_moe":
        return _deepseek_experts(read, kind, layers)
    if kind == "nemotron_h":
        return _nemotron_experts(read)
    if kind in GRANITE_EXPERTS:
        return _granite_experts(read, kind, layers)
    if kind not in ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        return None
    count = read.integer("num_local_experts", "num_experts", least=1)
    active = read.integer("num_experts_per_tok", least=1, most=count)
    if kind in ("mixtral", "gpt_oss"):
        biased, ffn = kind == "gpt_oss", read.integer("intermediate_size", least=1)
        return MoEConfig(count, active, ffn, layers=tuple(range(layers)), router_bias=biased, bias=biased)
    step, dense = read.integer("decoder_sparse_step", default=1, least=1), read.integers("mlp_only_layers")
    shared = read.integer("shared_expert_intermediate_size", default=0) if kind in SHARED_EXPERT else 0
    return MoEConfig(
        count=count,
        active=active,
        ffn=read.integer("moe_intermediate_size", least=1),
        shared_ffn=shared,
        shared_gate=shared > 0,
        renormalize=read.flag("norm_topk_prob", default=kind == "qwen3_5_moe_text"),
        layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _granite_experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    """The mixture of experts of Granite, beside which the shared expert is the dense network of other models."""
    count = read.integer("num_local_experts")
    if not count:
        return None
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=read.integer("intermediate_size", least=1),
        shared_ffn=read.integer("shared_intermediate_size", default=1024 if kind == "granitemoehybrid" else 0)
        if kind != "granitemoe"
        else 0,
        layers=tuple(range(layers)),
    )


def _nemotron_experts(read: Fields) -> MoEConfig | None:
    """The mixture of experts of Nemotron 3: DeepSeek-V3's with networks that are not gated."""
    layers = tuple(i for i, kind in enumerate(read.texts("layer_types")) if kind == "moe")
    if not layers:
        return None
    if read.has("moe_latent_size"):
        raise read.wrong("moe_latent_size", "null: experts of latent vectors are not supported", "a size")
    if read.flag("mlp_bias", default=False):
        raise read.wrong("mlp_bias", "false for a model with experts", True)
    if read.integer("n_shared_experts", default=1) != 1:
        raise read.wrong("n_shared_experts", "1 for nemotron_h", read.raw["n_shared_experts"])
    count = read.integer("n_routed_experts", least=1)
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=read.integer("moe_intermediate_size", least=1),
        shared_ffn=read.integer("moe_shared_expert_intermediate_size", default=7688, least=1),
        renormalize=read.flag("norm_topk_prob", default=True),
        layers=layers,
        scoring="sigmoid",
        selection_bias=True,
        groups=read.integer("n_group", default=1, least=1),
        active_groups=read.integer("topk_group", default=1, least=1),
        ranked_by=2,
        scale=read.number("routed_scaling_factor", default=1.0),
    )
