"""Builders of methods that draft with the target itself, made cheaper."""

from functools import partial
from pathlib import Path

from foretell.catalogue.parts import Parts, chain_of, copy_of, early_exit, own, test_of
from foretell.config import SpeculativeConfig
from foretell.draft import (
    DraftModel,
)
from foretell.method import AnyMethod, Method
from foretell.model.compress import quantized, sparse, unchanged
from foretell.model.influence import influence
from foretell.model.runner import DecoderRunner
from foretell.model.skip import default_skip, read_skip
from foretell.shape import (
    Adaptive,
    Chain,
    Threshold,
)


def layer_skip(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """The target's first blocks draft."""
    return Method(early_exit(parts, config), chain_of(config, 4, confidence=0.4), test_of(config))


def self_speculative(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """Draft & Verify."""
    network = own(parts)
    layers, model = network.config.layers, parts.source.fingerprint() if parts.source else ""
    skip = read_skip(Path(config.skip_set), model, layers) if config.skip_set else default_skip(layers)
    chain = Chain(
        8 if config.num_speculative_tokens is None else config.num_speculative_tokens,
        draw=config.draft_sample_method != "greedy",
        confidence=0.8 if config.confidence_threshold is None else config.confidence_threshold,
    )
    return Method(DraftModel(DecoderRunner(network.skipping(skip))), Adaptive(chain, Threshold()), test_of(config))


def quantised_draft(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A copy in fewer bits drafts."""
    bits = config.quantization_bits
    if bits == 8 and parts.source is not None:
        network = copy_of(parts, unchanged, "int8")
    else:
        network = copy_of(parts, partial(quantized, bits=bits, group=config.quantization_group))
    return Method(DraftModel(DecoderRunner(network)), chain_of(config, 4, confidence=0.4), test_of(config))


def pruned_draft(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    """A copy without its least influential blocks drafts."""
    network = own(parts)
    layers = network.config.layers
    dropped = layers // 4 if config.pruned_layers is None else config.pruned_layers
    if dropped > layers:
        raise ValueError(f"a pruned draft cannot lack {dropped} blocks: the model has {layers}")
    skip = influence(network, _sample_text(parts)).drop(dropped)
    whole = copy_of(parts, partial(sparse, share=config.sparsity)) if config.sparsity else network
    return Method(DraftModel(DecoderRunner(whole.skipping(skip))), chain_of(config, 4, confidence=0.4), test_of(config))


_SAMPLE = """The old harbour was quiet in the early morning. A few boats had come in with fish, and the market would open at seven.
def mean(values): return sum(values) / len(values)
Question: how many legs do three spiders have? Answer: 3 x 8 = 24."""


def _sample_text(parts: Parts) -> list[int]:
    """Tokens that the influence of layers is measured on."""
    if parts.references and len(parts.references[0]) > 1:
        return list(parts.references[0][:512])
    if parts.codec is not None:
        return parts.codec.encode(_SAMPLE)
    return list(range(min(parts.vocab, 64)))
