"""The format of IBM's multi-stage MLP speculators (`mlp_speculator`): fms-extras, vLLM and TGI."""

from pathlib import Path

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.readers.unread_keys import refuse_other_keys
from foretell.speculator.formats.base import (
    CheckpointFormat,
    ConvertedCheckpoint,
    ExportFormat,
    Verifier,
    dtype_name,
    target_info,
    write_checkpoint,
)
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.speculator.network.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig

ARCHITECTURES = ("MLPSpeculatorPreTrainedModel", "MLPSpeculatorModel", "MLPSpeculator")
_OURS = {"emb": "token", "proj": "project", "head": "output", "ln": "norm"}
_KEYS = (
    "model_type", "emb_dim", "vocab_size", "n_predict", "inner_dim", "tie_weights", "tie_wts", "scale_input",
    "top_k_tokens_per_head", "n_candidates",
)  # fmt: skip
"""The last two are the trees of the authors' code."""


def published_names(stages: int, tied: bool) -> dict[str, str]:
    """Foretell's tensor names to the published ones; tied stages are stored once, except the first projection."""
    counts = {"emb": 1, "proj": min(stages, 2), "head": 1, "ln": 1} if tied else dict.fromkeys(_OURS, stages)
    out = {f"{_OURS[t]}.{i}.weight": f"{t}.{i}.weight" for t, count in counts.items() for i in range(count)}
    return out | {f"norm.{i}.bias": f"ln.{i}.bias" for i in range(counts["ln"])}


def _fits(files: PublishedCheckpoint) -> bool:
    return files.config.get("model_type") == "mlp_speculator" or any(a in ARCHITECTURES for a in files.architectures)


def _read(files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead) -> ConvertedCheckpoint:
    files = files.strip_prefixes("speculator.")
    refuse_other_keys(files.fields, _KEYS)
    hidden, vocab, stages = (
        files.fields.integer("emb_dim"),
        files.fields.integer("vocab_size"),
        files.fields.integer("n_predict"),
    )
    inner = files.fields.integer("inner_dim", default=0) or hidden
    # Older versions of fms-extras write `tie_wts`.
    tied = files.fields.flag("tie_weights", "tie_wts", default=False)
    config = MLPSpeculatorConfig(
        target=target_info(files, target, hidden, vocab),
        stages=stages,
        inner=inner,
        tied=tied,
        scale_input=files.fields.flag("scale_input", default=False),
        own_embedding=True,
    )
    tensors = {}
    for ours, theirs in published_names(stages, tied).items():
        shape = {"emb": (vocab, inner), "head": (vocab, inner), "ln": (inner,)}.get(theirs.split(".")[0])
        tensors[ours] = files.require(theirs, *(shape or (inner, hidden if theirs == "proj.0.weight" else inner)))
    return ConvertedCheckpoint(config, tensors)


def _write(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, MLPSpeculator)
    c = network.config
    layout = {
        "model_type": "mlp_speculator",
        "architectures": [ARCHITECTURES[0]],
        "base_model_name_or_path": verifier.name,
        "vocab_size": network.target_info.vocab,
        "emb_dim": network.target_info.hidden,
        "inner_dim": c.inner,
        "n_predict": c.stages,
        "top_k_tokens_per_head": [max(2, 5 - i) for i in range(c.stages)],
        "n_candidates": 5,
        "tie_weights": c.tied,
        "scale_input": c.scale_input,
        "torch_dtype": dtype_name(network),
    }
    write_checkpoint(folder, layout, network.published_tensors())


IBM = CheckpointFormat("mlp_speculator", _fits, _read)
TO_VLLM = ExportFormat("vllm-mlp", "mlp_speculator", _write)
