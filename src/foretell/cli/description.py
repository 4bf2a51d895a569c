"""What the files of a model say, read without its weights: for `foretell inspect` and `foretell models`.

Of a GGUF file the header is enough, and torch is not imported. A directory is opened as `foretell.load` opens it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from foretell.model.config.model import ModelConfig
from foretell.model.load.gguf_header import GGUFHeader, check_model, gguf_config, kind_name, unread_tensors
from foretell.model.load.nearest_blocks import nearest_of
from foretell.tokenizer.gguf import check_tokenizer

_NUMBER = re.compile(r"\d+")
_TEMPLATE = "tokenizer.chat_template"
CACHE_BYTES = 2
"""Of a number of the key-value cache in the default precision."""


@dataclass(frozen=True)
class TensorKind:
    """The tensors of one storage type."""

    kind: str
    tensors: int
    numbers: int
    """Numbers that they hold; of packed words, the words."""
    bytes: int
    read_as: str = ""
    """What they become that no kernel reads, and what is lost by that."""
    memory: int = 0
    """Bytes that they become; 0: `bytes`."""


@dataclass(frozen=True)
class Description:
    """A model by its files."""

    path: Path
    architecture: str
    bytes: int
    """Of its weights."""
    kinds: tuple[TensorKind, ...]
    weights: int
    """Numbers of the model, whatever they are packed in; 0: unknown."""
    name: str = ""
    """The name that the file gives it."""
    config: ModelConfig | None = None
    refusal: str = ""
    """Why it does not run; empty: it runs."""
    runs_on: str = "own decoder"
    tokenizer: str = ""
    template: str = ""
    ends: Mapping[int, str] = field(default_factory=dict)
    """Tokens that end an answer."""
    unread: tuple[str, ...] = ()
    """What is not read, tensors of the same name in all blocks together."""

    @property
    def bits(self) -> float:
        """Bits per number of the model, scales and all; 0: unknown."""
        return 8 * self.bytes / self.weights if self.weights else 0.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values per token, beyond any window."""
        c = self.config
        if c is None:
            return 0
        own = [c.cache_sizes_of(i) for i in c.attention_layers if c.kv_layer_of(i) == i and not c.window_of(i)]
        return CACHE_BYTES * sum(s.kv_heads * s.head_dim * (1 if c.latent else 2) for s in own)


def describe(path: Path) -> Description:
    """What the GGUF file or the directory of a model says.

    Raises:
        ValueError: the files are damaged or not complete.
    """
    return _of_gguf(path) if path.is_file() else _of_directory(path)


def _of_gguf(path: Path) -> Description:
    file = GGUFHeader(path)
    meta, tensors = file.metadata, file.tensors.values()
    config, refusal, unread = None, "", list[str]()
    try:
        config = gguf_config(file)
        check_model(file)
        check_tokenizer(meta)
        unread = unread_tensors(file, config)
        refusal = f"the decoder of {config.architecture} does not read the tensor {unread[0]}" if unread else ""
    except ValueError as error:
        refusal = str(error).removeprefix(f"{path}: ")
    tokens, ends = meta.get("tokenizer.ggml.tokens"), () if config is None else config.eos
    texts = tokens if isinstance(tokens, list) else []
    tokenizer = [f"{key} {meta[name]}" for key in ("model", "pre") if (name := f"tokenizer.ggml.{key}") in meta]
    templates = [key.removeprefix(f"{_TEMPLATE}.") for key in sorted(meta) if key.startswith(f"{_TEMPLATE}.")]
    kinds = [(kind_name(e.ggml_type), prod(e.shape), file.byte_count(e)) for e in tensors]
    nearest = {kind_name(e.ggml_type): near for e in tensors if (near := nearest_of(e.ggml_type))}
    together = (
        replace(each, read_as="" if near.kind == each.kind else near.words, memory=near.memory(each.numbers))
        if (near := nearest.get(each.kind))
        else each
        for each in _by_kind(kinds)
    )
    return Description(
        path,
        str(meta.get("general.architecture")),
        sum(size for *_, size in kinds),
        tuple(together),
        sum(numbers for _, numbers, _ in kinds),
        str(meta.get("general.name") or meta.get("general.basename") or ""),
        config,
        refusal,
        tokenizer=", ".join([*tokenizer, f"{len(texts):,} tokens"]),
        template=_template(meta.get(_TEMPLATE), templates),
        ends={i: texts[i] for i in ends if 0 <= i < len(texts)},
        unread=_together(unread),
    )


def _of_directory(path: Path) -> Description:
    from foretell.load import OpenCheckpoint, open_checkpoint, refuse_other_kinds
    from foretell.model.config.read_weights import layer_weights
    from foretell.model.config.readers.hf import is_decoder_family
    from foretell.model.load.quantized import QuantizedWeights
    from foretell.model.load.safetensors_file import SafetensorsFile
    from foretell.model.load.weights import SafetensorsWeights
    from foretell.utils.validation import read_json

    raw = read_json(path / "config.json", "download it again") if (path / "config.json").is_file() else {}
    files = [SafetensorsFile(file) for file in sorted(path.glob("*.safetensors"))]
    kinds = [(kind, prod(shape), size) for file in files for kind, shape, size in file.sizes()]
    family, size = str(raw.get("model_type", "unknown")), sum(size for *_, size in kinds)
    made = partial(Description, path, family, size, _by_kind(kinds))
    opened: OpenCheckpoint | None = None
    refusal, runs_on, weights = "", "own decoder", 0
    try:
        refuse_other_kinds(str(path), path, raw)
        if is_decoder_family(raw):
            opened = open_checkpoint(path, raw)
        else:
            runs_on = "transformers (foretell[hf]), more slowly"
    except ValueError as error:
        refusal = str(error).removeprefix(f"{path}: ")
    if opened is None:
        return made(weights, refusal=refusal, runs_on=runs_on)
    codec, config, stored = opened.read_codec(), opened.config, opened.weights
    if config.experts is None and config.state is None and config.latent is None:
        weights = layer_weights(config) + config.vocab * config.hidden * (1 if config.tied else 2)
    ends = sorted({*opened.eos, *codec.eos_ids})
    return made(
        weights,
        str(raw.get("_name_or_path") or ""),
        config,
        tokenizer=f"{type(codec.tokenizer.model).__name__}, {codec.tokenizer.get_vocab_size():,} tokens",
        template=_template(codec.chat_template, sorted(codec.named_templates)),
        ends={i: codec.tokenizer.id_to_token(i) or "" for i in ends},
        unread=_together(stored.unread(config) if isinstance(stored, SafetensorsWeights | QuantizedWeights) else ()),
    )


def _template(text: object, named: Iterable[str]) -> str:
    """The default template and the named ones in a few words."""
    default = [f"{len(text):,} characters"] if isinstance(text, str) else []
    return ", ".join([*default, *(f"{name} by name" for name in named)])


def _by_kind(tensors: Iterable[tuple[str, int, int]]) -> tuple[TensorKind, ...]:
    """The tensors of every storage type together, those with most bytes first."""
    count, numbers, sizes = Counter[str](), Counter[str](), Counter[str]()
    for kind, of, size in tensors:
        count[kind] += 1
        numbers[kind] += of
        sizes[kind] += size
    return tuple(TensorKind(kind, count[kind], numbers[kind], size) for kind, size in sizes.most_common())


def _together(names: Iterable[str]) -> tuple[str, ...]:
    """Names with `*` for their numbers, and how many there are of each where there are several."""
    count = Counter(_NUMBER.sub("*", name) for name in names)
    return tuple(name if n == 1 else f"{name} ({n})" for name, n in count.items())


def as_record(described: Description) -> dict[str, Any]:
    """The description as JSON."""
    c, own = described.config, asdict(replace(described, config=None))
    return own | {
        "path": str(described.path),
        "runs": not described.refusal,
        "bits": round(described.bits, 2),
        "cache_bytes_per_token": described.cache_bytes,
        "config": None if c is None else {key: getattr(c, key) for key in _SIZES},
    }


_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "window", "tied")
