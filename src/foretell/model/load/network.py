"""The network that runs a model fastest on a device: its precision and its backend."""

import torch

from foretell.model import kernels as native
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.linear import quantize_int8
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.load.build import build_block, build_decoder, build_without_blocks
from foretell.model.load.expert_offload import build_expert_network
from foretell.model.load.native import load_native, native_blocks, packed_file, weight_dtype
from foretell.model.load.transforms import DecoderTransform, identity
from foretell.model.load.weights import Weights
from foretell.model.offload.block_store import BlockStore, OffloadedDecoder, refuse_small_limit, weight_bytes
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.network import Network
from foretell.utils.names import unknown


def choose_precision(
    reference: str, dtype: str, config: ModelConfig, weights: Weights, device: torch.device
) -> Precision:
    """The precision that a dtype means for these weights.

    Raises:
        ValueError: it does not go with them, or not with this machine.
    """
    kernels, stored = runs_on_kernels(config, device), weights.storage
    if dtype == "auto":
        if stored == "quantized":
            return "int8-activations" if kernels else "bfloat16"
        return "float32" if stored == "float32" else "bfloat16"
    if dtype in ("int4", "int8-activations") and not kernels:
        raise ValueError(
            f"{reference}: {dtype} runs on the CPU kernels only, which do not run this model here"
            f"{' (' + native.unavailable_reason() + ')' if native.unavailable_reason() else ''}; use --dtype bfloat16"
        )
    if dtype == "int4" and stored == "quantized":
        raise ValueError(
            f"{reference}: its weights are quantised already; use --dtype auto, which keeps them as they are"
        )
    if dtype == "int8-activations" and stored != "quantized":
        raise ValueError(
            f"{reference}: int8-activations is for quantised weights, and this checkpoint has floats; use --dtype "
            "int4, int8 or bfloat16"
        )
    return "int8-activations" if dtype == "int4" else dtype  # type: ignore[return-value]


def parse_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ValueError: an unknown name, or cuda where there is no GPU.
    """
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise unknown("device", name, ["cpu", "cuda"])
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch finds no CUDA GPU here; use --device cpu")
    return torch.device(name)


def build_network(
    config: ModelConfig,
    weights: Weights,
    precision: Precision,
    device: torch.device,
    change: DecoderTransform = identity,
) -> Network:
    """The network that runs the model fastest on this machine, after `change` to its weights."""
    if runs_on_kernels(config, device) and change is identity:
        return load_native(config, weights, precision)
    decoder = change(build_decoder(config, weights, weight_dtype(precision), device))
    if precision == "int8-activations":  # changed weights are floats
        precision = "bfloat16"
    if runs_on_kernels(config, device):
        return NativeDecoder(decoder, precision)
    if precision == "int8":
        quantize_int8(decoder)
    return (
        GraphedDecoder(decoder)
        if device.type == "cuda" and config.experts is None and config.state is None
        else decoder
    )


def build_streamed_network(
    config: ModelConfig, weights: Weights, precision: Precision, device: torch.device, limit: int
) -> Network:
    """The network with at most `limit` bytes of weights in memory; its results are those of `build_network`."""
    if runs_on_kernels(config, device):
        kept = packed_file(config, weights, precision)
        by_expert = None
        if config.experts is not None and kept is not None:
            by_expert = build_expert_network(config, weights, precision, limit, kept)
        if isinstance(by_expert, NativeDecoder):
            return by_expert
        streamed = native_blocks(config, weights, precision, limit, kept)
        count, fixed = config.layers + streamed.head_pieces, weight_bytes(streamed.outer)
        if isinstance(by_expert, int) and streamed.sizes is not None and by_expert < fixed + max(streamed.sizes):
            refuse_small_limit(limit, "what all tokens need and one expert", by_expert)
        store = BlockStore(count, streamed.fetch, weights.release_pages, limit, fixed, streamed.sizes)
        return OffloadedDecoder(streamed.outer, store, streamed.head_pieces)
    shell = build_without_blocks(config, weights, weight_dtype(precision), device)

    def fetch_block(i: int) -> DecoderBlock:
        block = build_block(config, i, weights, weight_dtype(precision), device)
        if precision == "int8":
            quantize_int8(block)
        return block

    if precision == "int8":
        quantize_int8(shell)
    return OffloadedDecoder(
        shell, BlockStore(config.layers, fetch_block, weights.release_pages, limit, weight_bytes(shell))
    )


def runs_on_kernels(config: ModelConfig, device: torch.device) -> bool:
    """Whether the native kernels run this model on this machine."""
    return device.type == "cpu" and native.available() and NativeDecoder.supports(config)
