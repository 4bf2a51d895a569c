"""Writes a quantised model as a GGUF file, tensor after tensor.

Metadata of GGUF files: copied, or made from a configuration and a byte-level BPE tokenizer.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from foretell.lab.quantize.gguf_grids import GGUFGrid
from foretell.lab.quantize.grid import QuantizedRows
from foretell.lab.quantize.layout import TensorEntry, entries
from foretell.model.config.model import ModelConfig
from foretell.model.config.rope import RopeConfig
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_sizes import write_sizes
from foretell.model.load.gguf_weights import gguf_place
from foretell.model.matrices.kinds import BLOCKS, Kind
from foretell.tokenizer.codec import TextCodec
from foretell.tokenizer.pre_tokenizers import CONTRACTION, PRE_TOKENIZERS

_WRITABLE = ("llama", "mistral", "qwen2", "qwen3")
_REPLACED = ("general.architecture", "general.file_type", "general.quantization_version")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Token types."""
_SPLITS = ("llama-bpe", "qwen2")
"""llama.cpp's names of pre-tokenizers that split by a pattern."""
_PUBLISHED_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def copy_metadata(writer: Any, source: GGUF) -> None:
    """Copy all metadata of a file but what describes its types."""
    from gguf import GGUFReader, GGUFValueType

    for name, field in GGUFReader(source.path).fields.items():
        if not name.startswith("GGUF.") and name not in _REPLACED:
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)


def write_metadata(
    writer: Any, config: ModelConfig, codec: TextCodec, eos: Sequence[int], name: str
) -> Sequence[float]:
    """Write the metadata of a model of the Llama or Qwen family; returns divisors of its rotary frequencies.

    Raises:
        ValueError: another architecture, or a part or a tokenizer that cannot be described.
    """
    c = config
    if c.architecture not in _WRITABLE:
        raise ValueError(
            f"{name}: a GGUF file can be made of {', '.join(_WRITABLE)} directories and of GGUF files, found "
            f"{c.architecture}; write a directory"
        )
    unsupported = {
        "a sliding window": c.window > 0,
        "biases of its output or feed-forward matrices": c.output_bias or c.mlp_bias,
        "biases of queries, keys and values": c.qkv_bias and c.architecture in ("llama", "mistral"),
    }
    part = next((part for part, present in unsupported.items() if present), None)
    if part is not None:
        raise ValueError(f"{name}: {part} cannot be described in a GGUF file; write a directory")
    writer.add_name(name)
    write_sizes(writer, c, c.vocab)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    divisors = _write_rope(writer, c, name)
    _write_tokenizer(writer, c, codec, eos, name)
    return divisors


def _write_rope(writer: Any, c: ModelConfig, name: str) -> Sequence[float]:
    rope = c.rope
    assert rope is not None
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(c.head_dim)
    if rope.fraction != 1 or rope.kind not in ("default", "linear", "llama3"):
        raise ValueError(f"{name}: rotary positions of the kind {rope.kind} cannot be written to GGUF yet")
    if rope.kind == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    return _llama3_divisors(rope, c.head_dim) if rope.kind == "llama3" else rope.divisors


def _llama3_divisors(rope: RopeConfig, head_dim: int) -> list[float]:
    """Llama 3's scaling as divisors of the frequencies."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    rotations = rope.original_context * plain / (2 * torch.pi)
    smooth = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope.factor + smooth)).tolist()


def _write_tokenizer(writer: Any, c: ModelConfig, codec: TextCodec, eos: Sequence[int], name: str) -> None:
    tokenizer = json.loads(codec.tokenizer.to_str())
    model = tokenizer["model"]
    byte_level = "ByteLevel" in json.dumps(tokenizer["decoder"])
    if model.get("type") != "BPE" or model.get("byte_fallback") or not byte_level or not model["merges"]:
        raise ValueError(
            f"{name}: its tokenizer is no byte-level BPE, which alone is written to GGUF; write a directory"
        )
    special = {t["id"]: _CONTROL if t["special"] else _USER_DEFINED for t in tokenizer["added_tokens"]}
    texts = {index: text for text, index in codec.tokenizer.get_vocab(with_added_tokens=True).items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer, name))
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(c.vocab)])
    writer.add_token_types([special.get(i, _NORMAL if i in texts else _UNUSED) for i in range(c.vocab)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    if c.bos is not None:
        writer.add_bos_token_id(c.bos)
    own = None if codec.eos is None else codec.tokenizer.token_to_id(codec.eos)
    first = next(iter(eos), None) if own is None else own
    if first is not None:
        writer.add_eos_token_id(first)
        writer.add_array("tokenizer.ggml.eos_token_ids", list(eos) or [first])
    writer.add_add_bos_token(c.bos is not None and codec.encode("")[:1] == [c.bos])
    if codec.chat_template is not None:
        writer.add_chat_template(codec.chat_template)


def pre_tokenizer_name(tokenizer: dict[str, Any], name: str) -> str:
    """llama.cpp's name of the pre-tokenizer.

    Raises:
        ValueError: an unknown one.
    """
    stages = tokenizer["pre_tokenizer"] or {}
    stages = stages.get("pretokenizers", [stages])
    kinds = [stage.get("type") for stage in stages]
    if kinds == ["Digits", "ByteLevel"] and stages[0].get("individual_digits"):
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"]:
        pattern = (stages[0].get("pattern") or {}).get("Regex")
        cut = (str(pattern).replace(_PUBLISHED_CONTRACTION, CONTRACTION),)
        for known in _SPLITS:
            if PRE_TOKENIZERS[known].patterns == cut:
                return known
    raise ValueError(
        f"{name}: llama.cpp has no name for its pre-tokenizer ({', '.join(map(str, kinds))}); write a directory"
    )


_FREQUENCIES = "rope_freqs.weight"
_FILE_TYPES: Mapping[str, str] = {"Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}
"""Names of file types that differ from those of their matrices."""


class GGUFFile:
    """A GGUF file that is being written; tensors come in the order of `entries`.

    `source`: the GGUF file whose metadata is copied, or None, then they are made from `config` and `codec`.

    Raises:
        ValueError: the model or its tokenizer cannot be described in GGUF.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        grid_of: Callable[[TensorEntry], GGUFGrid],
        kind: str,
        source: GGUF | None,
        codec: TextCodec,
        eos: Sequence[int],
        name: str,
    ) -> None:
        from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

        architecture = gguf_architecture(config)
        self._config, self._permute, self._grid_of = config, architecture == "llama", grid_of
        self._writer = GGUFWriter(path, architecture)
        self._expected = {gguf_place(e.name, config)[0]: e for e in entries(config)}
        divisors: Sequence[float] = ()
        if source is None:
            divisors = write_metadata(self._writer, config, codec, eos, name)
        else:
            _require_known(source, self._expected)
            copy_metadata(self._writer, source)
            if _FREQUENCIES in source.tensors:
                divisors = source.load_tensor(_FREQUENCIES).flatten().tolist()
        self._writer.add_file_type(LlamaFileType[f"MOSTLY_{_FILE_TYPES.get(kind, kind)}"])
        self._writer.add_quantization_version(2)
        if divisors:
            self._writer.add_tensor_info(_FREQUENCIES, [len(divisors)], np.dtype(np.float32), 4 * len(divisors))
        for stored, entry in self._expected.items():
            if len(entry.shape) == 1:
                self._writer.add_tensor_info(stored, entry.shape, np.dtype(np.float32), 4 * entry.shape[0])
                continue
            grid = self._grid_of(entry)
            per_block, size = BLOCKS[grid.kind]
            shape = [entry.shape[0], entry.shape[1] // per_block * size]
            self._writer.add_tensor_info(
                stored, shape, np.dtype(np.uint8), shape[0] * shape[1], GGMLQuantizationType[grid.kind]
            )
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        if divisors:
            self._writer.write_tensor_data(np.array(divisors, np.float32))
        self._order = iter(self._expected.values())

    def add(self, name: str, tensor: QuantizedRows | Float[torch.Tensor, "*shape"]) -> None:
        """Write the next tensor."""
        entry = next(self._order)
        assert entry.name == name, f"{entry.name} was expected, found {name}"
        permuted = self._permute and name.split(".")[-2] in ("q_proj", "k_proj")
        if isinstance(tensor, QuantizedRows):
            grid = self._grid_of(entry)
            data = grid.stored(tensor).data
            self._writer.write_tensor_data(np.ascontiguousarray((self._interleave(data) if permuted else data).numpy()))
        else:
            values = self._interleave(tensor) if permuted else tensor
            self._writer.write_tensor_data(np.ascontiguousarray(values.float().numpy()))

    def _interleave(self, rows: torch.Tensor) -> torch.Tensor:
        """llama.cpp's order of rows: rotary pairs side by side."""
        half = self._config.head_dim // 2
        return rows.view(-1, 2, half, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()

    def abandon(self) -> None:
        """Close what was written so far."""
        self._writer.close()


def gguf_architecture(config: ModelConfig) -> str:
    """The architecture's name in GGUF."""
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.architecture, config.architecture)


def _require_known(source: GGUF, expected: Mapping[str, Any]) -> None:
    """Refuse a file with a tensor that would not be written.

    Raises:
        ValueError: there is one.
    """
    unknown = next((n for n in source.tensors if n not in expected and n != _FREQUENCIES), None)
    if unknown is not None:
        raise ValueError(f"{source.path}: the tensor {unknown} is not known, and the new file would lack it")


def embedding_kind(kind: Kind) -> Kind:
    """Type of embedding and head beside matrices of a type: more bits, as llama.cpp gives them."""
    return "Q8_0" if kind != "Q6_K" else "Q6_K"
