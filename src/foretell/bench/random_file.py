"""Writes a GGUF file of random weights in the shape of a published model, with the embedded model's tokenizer.

Every program that reads GGUF files runs it; what it says is noise, its times and its memory are those of the real one.
What a mixture reads depends on its text, so that of a mixture does not repeat one token: its output matrix mixes four
permutations of the embeddings, to which every sub-layer adds little, as in trained models.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from foretell.model.config.model import ModelConfig
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_sizes import write_sizes
from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
from foretell.model.matrices.kinds import BLOCKS, Kind
from foretell.roofline.model_configs import find_model
from foretell.utils.names import unknown
from foretell.utils.unfinished import whole

WEIGHTS: dict[str, Kind] = {
    "bf16": "BF16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q4_K": "Q4_K", "IQ4_NL": "IQ4_NL",
}  # fmt: skip
"""Storage types of the matrices, by the names of `--weights`. The head of Q4_K is Q6_K, of other quantised types Q8_0,
as llama.cpp has them.
"""
_WIDE_ROWS: dict[Kind, Kind] = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""Types of matrices whose rows are no whole blocks of 256."""
_ROWS_BYTES = 64 << 20
"""Bytes that are drawn at a time."""
_UNUSED = 5
"""Token type of the fillers that pad the vocabulary."""
_NORM = 1e-5


def random_model_file(shape: str, weights: str, folder: Path) -> Path:
    """The file of a shape and a storage type, written at the first call.

    Raises:
        ValueError: an unknown shape or type, or an architecture that is neither Llama's nor Mixtral's.
    """
    if weights not in WEIGHTS:
        raise unknown("type of weights", weights, WEIGHTS)
    name, config = find_model(shape)
    if config.architecture not in ("llama", "mixtral"):
        raise ValueError(
            f"--weights writes models of the architectures llama and mixtral; {shape} is {config.architecture}"
        )
    path = folder / f"random-{name}-{weights}.gguf"
    if not path.is_file():
        with whole(path) as part:
            _write(part, config, WEIGHTS[weights])
    return path


def _write(target: Path, config: ModelConfig, kind: Kind) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(target, "llama")
    vocab = config.vocab
    for name, value in GGUF(resolve_reference(DEFAULT_MODEL)).metadata.items():
        if not name.startswith("tokenizer."):
            continue
        if isinstance(value, list):
            if name.endswith((".tokens", ".token_type", ".scores")):
                vocab = max(vocab, len(value))
                value = [*value, *_fillers(name, len(value), vocab)]
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    write_sizes(writer, config, vocab)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta if config.rope else 1e4)
    writer.add_layer_norm_rms_eps(_NORM)
    if config.experts is not None:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.active)
        writer.add_expert_feed_forward_length(config.experts.ffn)
    tensors = list(_tensors(config, vocab, kind))
    for name, shape, form in tensors:
        per_block, size = BLOCKS[form]
        stored = (*shape[:-1], shape[-1] // per_block * size)
        quantized = form not in ("F32", "BF16")
        writer.add_tensor_info(
            name, stored if quantized else shape, np.dtype(np.uint8 if quantized else np.float32),
            int(np.prod(stored)), GGMLQuantizationType[form],
        )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.Generator(np.random.SFC64(0))
    with target.open("ab") as file:
        file.write(bytes(-file.tell() % 32))
        for name, shape, form in tensors:
            if config.experts is None:
                parts = _random_rows(random, shape, form)
            else:
                parts = _rows_of_mixture(random, name, shape, form, config.layers)
            written = sum(map(file.write, parts))
            file.write(bytes(-written % 32))
    writer.close()


def _fillers(name: str, first: int, last: int) -> list[Any]:
    if name.endswith(".tokens"):
        return [f"<filler {i}>" for i in range(first, last)]
    return [_UNUSED if name.endswith(".token_type") else 0.0] * (last - first)


def _tensors(config: ModelConfig, vocab: int, kind: Kind) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Names, shapes and types of all tensors."""
    c, q, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim

    def fitting(form: Kind, inputs: int) -> Kind:
        return _WIDE_ROWS.get(form, form) if inputs % BLOCKS[form][0] else form

    head: Kind = {"BF16": "BF16", "Q4_K": "Q8_0" if c.experts else "Q6_K"}.get(kind, "Q8_0")
    stored: Kind = "BF16" if c.experts is not None else fitting(head if c.tied else kind, c.hidden)
    yield "token_embd.weight", (vocab, c.hidden), stored
    yield "output_norm.weight", (c.hidden,), "F32"
    if not c.tied:
        yield "output.weight", (vocab, c.hidden), head if c.experts is not None else fitting(head, c.hidden)
    sizes: dict[str, tuple[int, ...]] = {
        "attn_q": (q, c.hidden), "attn_k": (kv, c.hidden), "attn_v": (kv, c.hidden), "attn_output": (c.hidden, q),
    }  # fmt: skip
    if c.experts is None:
        sizes |= {"ffn_gate": (c.ffn, c.hidden), "ffn_up": (c.ffn, c.hidden), "ffn_down": (c.hidden, c.ffn)}
    else:
        n, width = c.experts.count, c.experts.ffn
        up, down = (n, width, c.hidden), (n, c.hidden, width)
        sizes |= {"ffn_gate_exps": up, "ffn_up_exps": up, "ffn_down_exps": down}
    for i in range(c.layers):
        yield f"blk.{i}.attn_norm.weight", (c.hidden,), "F32"
        yield f"blk.{i}.ffn_norm.weight", (c.hidden,), "F32"
        for stem, shape in sizes.items():
            yield f"blk.{i}.{stem}.weight", shape, fitting(kind, shape[-1])
        if c.experts is not None:
            yield f"blk.{i}.ffn_gate_inp.weight", (c.experts.count, c.hidden), "F32"


_STEP: dict[Kind, float] = {
    "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q8_0": 74.0, "Q4_K": 190.0, "Q6_K": 1360.0, "IQ4_NL": 69.0,
}  # fmt: skip
"""Standard deviation of a weight whose block has random levels, in units of the block's scale."""


_SUCCESSORS = 4
"""Tokens that may follow a token in the text of a mixture."""


def _rows_of_mixture(
    random: np.random.Generator, name: str, shape: tuple[int, ...], form: Kind, layers: int
) -> Iterator[bytes]:
    """The bytes of a tensor of a mixture in pieces."""
    if name in ("token_embd.weight", "output.weight"):
        drawn = np.random.Generator(np.random.SFC64(1))  # the same ones for both
        embedding = drawn.standard_normal(shape, np.float32)
        if name == "output.weight":
            after = np.zeros_like(embedding)
            for _ in range(_SUCCESSORS):
                after += embedding[drawn.permutation(shape[0])]
            embedding = after * np.float32((_SUCCESSORS * shape[1]) ** -0.5)
        yield _rounded(embedding, form)
        return
    adds = name.endswith(("attn_output.weight", "ffn_down_exps.weight"))
    yield from _random_rows(random, shape, form, (2 * layers) ** -0.5 if adds else 1.0)


def _rounded(rows: Float[np.ndarray, "o i"], form: Kind) -> bytes:
    """Rows as bfloat16 or Q8_0."""
    if form == "BF16":
        upper: bytes = (rows.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return upper
    blocks = rows.reshape(-1, BLOCKS["Q8_0"][0])
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    numbers = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-8)).astype(np.int8)
    stored: bytes = np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], 1).tobytes()
    return stored


def _random_rows(
    random: np.random.Generator, shape: tuple[int, ...], form: Kind, factor: float = 1.0
) -> Iterator[bytes]:
    """The bytes of a tensor in pieces: ones for norms, else numbers with a variance of `factor` squared over the
    inputs.
    """
    deviation = factor * shape[-1] ** -0.5
    if len(shape) == 1:
        yield np.ones(shape, np.float32).tobytes()
        return
    if form == "F32":
        yield (random.standard_normal(shape, np.float32) * np.float32(deviation)).tobytes()
        return
    per_block, size = BLOCKS[form]
    inputs, rows = shape[-1], int(np.prod(shape[:-1]))
    row = inputs // per_block * size
    step = max(_ROWS_BYTES // row, 1)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        if form == "BF16":
            numbers = random.standard_normal(count * inputs, np.float32) * deviation
            yield _rounded(numbers, form)
            continue
        blocks = np.frombuffer(bytearray(random.bytes(count * row)), np.uint8).reshape(-1, size)
        scale = np.float16(deviation / _STEP[form])
        at = size - 2 if form == "Q6_K" else 0
        blocks[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        if form in ("Q4_1", "Q4_K"):  # a minimum that makes the mean zero
            least = np.float16(-7.5 * scale if form == "Q4_1" else 7.5 * scale)
            blocks[:, 2:4] = np.frombuffer(least.tobytes(), np.uint8)
        yield blocks.tobytes()
