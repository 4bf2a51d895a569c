"""Loads the decoder on the CPU kernels from a checkpoint, one block at a time, or from the cache of packed weights."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float

from foretell.model.block.decoder import decoder_rope_tables
from foretell.model.block.spec import LINEARS, BlockWeights, LinearWeights
from foretell.model.block.weights import map_linears, map_matrices, read_block
from foretell.model.config.families import family_of
from foretell.model.config.model import ModelConfig
from foretell.model.kernels import build
from foretell.model.kernels.block_weights import PackedBlock, plan_block
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.embedding import NativeEmbedding
from foretell.model.kernels.experts import planned_bytes
from foretell.model.kernels.layer_inputs import NativeLayerInputs
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.pack import plan_rows
from foretell.model.kernels.packed_file import PackedFileError, PackedPart, PackedReader
from foretell.model.kernels.stack import NativeStack
from foretell.model.kernels.structures import Precision
from foretell.model.load.build import (
    LAYER_INPUTS_NORM,
    LAYER_INPUTS_PROJECTION,
    LAYER_INPUTS_TABLE,
    layer_inputs_sizes,
    require_last_layer,
)
from foretell.model.load.memory import available_memory
from foretell.model.load.packed_cache import PackedWeightsFile, UnfinishedFile, report_not_kept
from foretell.model.load.rounding import WidenedWeights
from foretell.model.load.streamed import StreamedHead, StreamedParts
from foretell.model.load.weights import Weights
from foretell.model.matrices.stored import StoredMatrix, widened

_EMBEDDING = "model.embed_tokens.weight"
_PACKED_AS_FLOATS = ("granitemoehybrid", "llama4_text")
"""Architectures, among those of attention alone, whose matrices are; see `packs_floats`."""
_MOST_OF_MEMORY = 0.5
"""Share of the available memory that quantised matrices may take as floats."""
OUTER_PARTS = 2
"""Parts of a file of packed weights before the blocks: the head, and the final norm."""


def weight_dtype(precision: Precision) -> torch.dtype:
    """Dtype that weights are rounded to before they are packed as floats or become int8."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def load_native(config: ModelConfig, weights: Weights, precision: Precision) -> NativeDecoder:
    """The decoder of a checkpoint on the kernels.

    Memory beyond the packed weights: a few rows, and the pages of the file until they are released. A thread then
    writes the weights to the cache, beyond this call; see `finish_writing`.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    weights = _fastest_to_read(config, weights, precision)
    place = _place_in_cache(config, weights, precision)
    kept = None if place is None else place.open()
    if place is not None and kept is not None:
        try:
            with kept:
                head, norm, *blocks = kept.read_all()
            outer = restore_outer(config, weights, precision, head, norm)
            return outer.with_blocks([_attach(outer, i, block) for i, block in enumerate(blocks)])
        except PackedFileError as error:
            place.discard(error)
    outer = pack_outer(config, weights, precision)
    packed = []
    for i in range(config.layers):
        packed.append(outer.stack.pack_block(i, packable_block(config, i, weights, precision)))
        weights.release_pages()
    parts = [*_outer_parts(outer), *packed]
    file = None if place is None else place.create(sum(tensor.nbytes for part in parts for tensor in part.tensors))
    if file is not None:
        pool = ThreadPoolExecutor(1)
        writing = pool.submit(_write, file, parts)
        _writing.add(writing)
        writing.add_done_callback(_writing.discard)
        pool.shutdown(wait=False)
    return outer.with_blocks(packed)


def _fastest_to_read(config: ModelConfig, weights: Weights, precision: Precision) -> Weights:
    """The checkpoint, its quantised matrices as floats where passes over bfloat16 are faster with them, and memory is
    at hand: without instructions for bfloat16, blocks take twice as long to widen as floats to read. Bits are the same.
    """
    if precision != "bfloat16" or weights.storage != "quantized" or packs_floats(config):
        return weights
    if not _widens_slowly():
        return weights
    wide, available = WidenedWeights(weights), available_memory()
    fits = available is not None and packed_bytes(config, wide, precision) <= available * _MOST_OF_MEMORY
    return wide if fits else weights


def _widens_slowly() -> bool:
    """Whether widening blocks to bfloat16 takes longer than reading that from memory: twice as long on AVX2."""
    return bool(build.library().foretell_instructions().startswith(b"avx2"))


class StreamedNetwork(NamedTuple):
    """A decoder without blocks, and where these are."""

    outer: NativeDecoder
    fetch: Callable[[int], PackedBlock | NativeLinear]
    """Gives block `i`, and after the blocks the pieces of the head."""
    sizes: list[int] | None = None
    """Bytes of what `fetch` gives; None: all blocks are about as large as the first."""
    head_pieces: int = 0
    """0: the decoder has its head."""


def packed_file(config: ModelConfig, weights: Weights, precision: Precision) -> PackedReader | None:
    """The file with these weights in the cache of packed weights, which is made first where there is none; None: it
    cannot be.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    place = _place_in_cache(config, weights, precision)
    kept = None if place is None else place.open()
    if place is None or kept is not None:
        return kept
    file = place.create(packed_bytes(config, weights, precision))
    if file is not None:

        def parts() -> Iterator[PackedPart]:
            outer = pack_outer(config, weights, precision)
            yield from _outer_parts(outer)
            for i in range(config.layers):
                yield outer.stack.pack_block(i, packable_block(config, i, weights, precision))
                weights.release_pages()

        _write(file, parts())
    return place.open()


def native_blocks(
    config: ModelConfig, weights: Weights, precision: Precision, limit: int, kept: PackedReader | None
) -> StreamedNetwork:
    """The decoder without blocks, and a function that gives block `i`: from the file of packed weights, or else from
    the checkpoint. From the file the head is read in pieces, too, where `limit` bytes do not hold it beside two blocks.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    if kept is not None:
        return _streamed(config, weights, precision, kept, limit)
    outer = pack_outer(config, weights, precision)
    return StreamedNetwork(outer, lambda i: outer.stack.pack_block(i, packable_block(config, i, weights, precision)))


def _streamed(
    config: ModelConfig, weights: Weights, precision: Precision, kept: PackedReader, limit: int
) -> StreamedNetwork:
    parts, sizes = StreamedParts(kept), kept.sizes()
    blocks, pieces = sizes[OUTER_PARTS:], None
    largest = max(blocks)
    streams_head = sizes[0] + 2 * largest > limit and StreamedHead.supports(kept) and weights.maps(_EMBEDDING)
    if streams_head:
        pieces = StreamedHead(kept, precision, largest)
        norm = parts.read(1).tensors[0].view(torch.float32)
        outer = _assemble(config, weights, precision, pieces.absent(), norm)
    else:
        outer = restore_outer(config, weights, precision, parts.read(0), parts.read(1))

    def fetch(i: int) -> PackedBlock | NativeLinear:
        if pieces is not None and i >= config.layers:
            return pieces.read(i - config.layers)
        return _attach(outer, i, parts.read(OUTER_PARTS + i))

    further = [] if pieces is None else pieces.sizes
    return StreamedNetwork(outer, fetch, [*blocks, *further], len(further))


def _attach(outer: NativeDecoder, i: int, part: PackedPart) -> PackedBlock:
    return outer.stack.attach(i, PackedBlock(part.structs, part.tensors))


def packed_bytes(config: ModelConfig, weights: Weights, precision: Precision) -> int:
    """About how many bytes the packed weights take."""
    kernels = build.library()
    blocks = {0, config.layers // 2, config.layers - 1}
    largest = max(_block_bytes(config, packable_block(config, i, weights, precision), precision) for i in blocks)
    head = plan_rows([weights.output_matrix(config)], precision)
    return config.layers * largest + sum(panels.nbytes(kernels) for panels in head)


def _block_bytes(config: ModelConfig, block: BlockWeights, precision: Precision) -> int:
    kernels = build.library()
    plans = plan_block(block, precision).values()
    own = sum(panels.nbytes(kernels) for plan in plans for panels in plan.weights)
    if block.experts is None or config.experts is None:
        return own
    return own + planned_bytes(config.experts, block.experts, precision, kernels)


def _place_in_cache(config: ModelConfig, weights: Weights, precision: Precision) -> PackedWeightsFile | None:
    if not weights.files:
        return None
    sizes = replace(config, rope=None, local_rope=None, context=1)
    return PackedWeightsFile(weights.files, weights.variant or precision, [repr(sizes)])


_writing = set[Future[None]]()
"""Files of the cache that threads of this process write."""


def finish_writing() -> None:
    """Wait until the packed weights of all models that were loaded are kept for the next start."""
    wait(set(_writing))


def _outer_parts(outer: NativeDecoder) -> list[PackedPart]:
    return [outer.head.packed, PackedPart((), [outer.norm])]


def _write(file: UnfinishedFile, parts: Iterable[PackedPart]) -> None:
    """Write packed parts to a file of the cache; a disk that fails is reported."""
    try:
        for part in parts:
            file.writer.add(part)
        file.finish()
    except OSError as error:
        report_not_kept(error)
        file.abandon()
    except BaseException:
        file.abandon()
        raise


def pack_outer(config: ModelConfig, weights: Weights, precision: Precision) -> NativeDecoder:
    """The decoder without its blocks.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    require_last_layer(config, weights)
    head = NativeLinear(weights.output_matrix(config), None, precision)
    weights.release_pages()
    norm = (
        weights.require(f"{family_of(config.architecture).final_norm}.weight", config.hidden).float()
        + config.norm_offset
    )
    return _assemble(config, weights, precision, head, norm)


def restore_outer(
    config: ModelConfig, weights: Weights, precision: Precision, head: PackedPart, norm: PackedPart
) -> NativeDecoder:
    """The decoder without its blocks, from packed parts."""
    scale = norm.tensors[0].view(torch.float32)
    return _assemble(config, weights, precision, NativeLinear.of_packed(head, precision), scale)


def _assemble(
    config: ModelConfig, weights: Weights, precision: Precision, head: NativeLinear, norm: Float[torch.Tensor, " d"]
) -> NativeDecoder:
    dtype = weight_dtype(precision)
    source: StoredMatrix | NativeLinear
    if weights.maps(_EMBEDDING):
        # A view of the file takes no memory of its own.
        source = weights.matrix(_EMBEDDING, config.vocab, config.hidden)
    elif head.holds_floats and (config.tied or weights.head_matrix(config.vocab, config.hidden) is None):
        source = head
    else:
        source = weights.matrix(_EMBEDDING, config.vocab, config.hidden)
        source = source if source.quantized else source.rounded(dtype)
    embedding = NativeEmbedding(source, dtype, config.embedding_scale, weights.maps(_EMBEDDING))
    stack = NativeStack(config, [], precision, *decoder_rope_tables(config))
    inputs = None if config.layer_inputs is None else _read_layer_inputs(config, weights, precision)
    return NativeDecoder.of_parts(config, embedding, stack, norm, head, inputs)


def _read_layer_inputs(config: ModelConfig, weights: Weights, precision: Precision) -> NativeLayerInputs:
    """The table of per-layer inputs, in a mapped file a view of it, and their projection, which is packed anew."""
    vocab, total, width = layer_inputs_sizes(config)
    table, dtype = weights.matrix(LAYER_INPUTS_TABLE, vocab, total), weight_dtype(precision)
    mapped = weights.maps(LAYER_INPUTS_TABLE)
    return NativeLayerInputs(
        NativeEmbedding(table if mapped else table.rounded(dtype), dtype, 1.0),
        NativeLinear(weights.matrix(LAYER_INPUTS_PROJECTION, total, config.hidden), None, precision),
        weights.require(LAYER_INPUTS_NORM, width).float() + config.norm_offset,
        config.norm_eps,
        mapped,
    )


def packable_block(config: ModelConfig, i: int, weights: Weights, precision: Precision) -> BlockWeights:
    """The weights of block `i` as they are packed: with the matrices that `weights` rounds.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    block, dtype = read_block(config, i, weights), weight_dtype(precision)
    if packs_floats(config):
        block = _as_floats(block, dtype)
    elif block.qkv is not None and block.output is not None:
        qkv, output = (_with_bias_in(linear, dtype) for linear in (block.qkv, block.output))
        block = replace(block, qkv=qkv, output=output)
    return map_matrices(block, lambda path, matrix: weights.round_matrix(f"model.layers.{i}.{path}", matrix))


def packs_floats(config: ModelConfig) -> bool:
    """Whether matrices are packed as floats, or rounded from these, whatever the checkpoint stores."""
    c = config
    beside_dense = c.experts is not None and c.experts.beside_dense
    in_parts = c.state is not None or c.latent is not None or c.attention_gate or beside_dense
    return in_parts or bool(c.low_rank) or c.shortcuts or c.architecture in _PACKED_AS_FLOATS


def _as_floats(block: BlockWeights, dtype: torch.dtype) -> BlockWeights:
    """A block whose matrices and their biases are floats, those of queries, keys and values one matrix."""

    def change(path: str, linear: LinearWeights) -> LinearWeights:
        if LINEARS[path].narrowest == "float32":
            return linear
        parts = tuple(widened(part).to(dtype) for part in linear.parts)
        whole = (torch.cat(parts),) if path == "qkv" else parts
        factor = None if linear.factor is None else widened(linear.factor).to(dtype)
        return _with_bias_in(LinearWeights(whole, linear.bias, factor), dtype)

    return map_linears(block, change)


def _with_bias_in(linear: LinearWeights, dtype: torch.dtype) -> LinearWeights:
    return linear if linear.bias is None else replace(linear, bias=linear.bias.to(dtype))
