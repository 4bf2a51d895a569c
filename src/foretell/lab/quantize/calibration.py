"""Calibration: texts of the model or of the user, and statistics of the inputs of a block's matrices on them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.lab.quantize.base import InputStatistics, Role, linears
from foretell.model.block.decoder import decoder_rope_tables
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.rope import RopeTables
from foretell.model.config.model import ModelConfig
from foretell.model.load.build import build_block
from foretell.model.load.weights import EMBEDDING, Weights
from foretell.model.training.full_forward import forward_blocks
from foretell.retrieval.corpus import read_documents, tokenize_documents
from foretell.tokenizer.codec import TextCodec
from foretell.train.data.dataset import Dataset, DatasetManifest, DatasetWriter
from foretell.train.data.generate import PromptSource, generate_answers

Tensor = torch.Tensor
LENGTH = 512
"""Tokens of a calibration sequence."""
_ROWS = 16
"""Texts that the model writes at once."""
_BATCH_TOKENS = 2048
"""Tokens of a pass through a block."""
_MAX_QUESTION, _MAX_ANSWER = 128, 256


@dataclass(frozen=True)
class CalibrationText:
    """Token sequences of one length: to calibrate on, and held back for the report."""

    calibration: Int[Tensor, "b s"]
    held_back: Int[Tensor, "c t"]
    origin: str


def check_token_counts(calibration: int, held_back: int, length: int) -> None:
    """Refuse numbers of tokens that make no sequence, before any text is written; `calibration` 0: there is none.

    Raises:
        ValueError: one is smaller than a sequence.
    """
    for name, tokens in (("--calibration-tokens", calibration), ("--held-back-tokens", held_back)):
        if tokens < length and (tokens or name == "--held-back-tokens"):
            raise ValueError(
                f"{name}: texts are read in sequences of {length} tokens; ask for at least so many, found {tokens}"
            )


def generated_documents(model: Model, num_tokens: int, seed: int) -> list[list[int]]:
    """Questions and answers that the model writes, as training data is made.

    Raises:
        ValueError: the model has no chat template, or writes no usable questions.
    """
    manifest = DatasetManifest(
        model=model.name,
        fingerprint="",
        tokenizer="",
        vocab=model.config.vocab,
        kind="self",
        seed=seed,
        greedy_share=0.5,
        max_question=_MAX_QUESTION,
        max_answer=_MAX_ANSWER,
    )
    with TemporaryDirectory() as folder, DatasetWriter(Path(folder), manifest) as writer:
        for _ in generate_answers(model, PromptSource(model, manifest, None), manifest, writer, _ROWS, num_tokens):
            pass
        writer.seal()
        return [document.tokens.tolist() for document in Dataset.open(Path(folder))]


def text_documents(files: Iterable[Path], codec: TextCodec, length: int = LENGTH) -> list[list[int]]:
    """Pieces of the texts, of at most `length` tokens each, with the tokens that begin a prompt.

    Raises:
        ValueError: a file is no text.
    """
    first = codec.encode("")
    step = length - len(first)
    documents = tokenize_documents((text for file in files for text in read_documents(file)), codec)
    return [[*first, *d[at : at + step].tolist()] for d in documents for at in range(0, len(d), step)]


def split_text(
    documents: Sequence[Sequence[int]], calibration: int, held_back: int, length: int, origin: str
) -> CalibrationText:
    """Sequences of `length` tokens of whole documents for calibration, and of the documents after them.

    Raises:
        ValueError: there is not enough text.
    """
    total, least = sum(map(len, documents)), max(held_back, length)
    first, second = list[int](), list[int]()
    for document in documents:
        if len(first) < calibration:
            first += document
        elif len(second) < least:
            second += document
    wanted = calibration - calibration % length if calibration else 0
    if len(first) < wanted or len(second) < length:
        needed = calibration + least
        parts = "" if total < needed else f", in documents that leave {len(second):,} beside those of calibration"
        raise ValueError(
            f"{origin}: {total:,} tokens of text were found{parts}, and {needed:,} are needed; give more text, or ask "
            "for fewer tokens"
        )
    return CalibrationText(_sequences(first, length, wanted), _sequences(second, length, held_back), origin)


def _sequences(tokens: Sequence[int], length: int, limit: int) -> Int[Tensor, "b s"]:
    count = min(len(tokens), max(limit, length if limit else 0)) // length
    return torch.from_numpy(np.array(tokens[: count * length], np.int64)).view(-1, length)


class BlocksOnText:
    """Iterates over the numbers and the blocks of a model in float32, of which `states` is what the next one reads;
    None: nothing is read. A block runs when the next one is asked for, with the weights that it has then.
    """

    def __init__(self, config: ModelConfig, weights: Weights, states: Float[Tensor, "b s d"] | None) -> None:
        self._config, self._weights, self.states = config, weights, states
        self._ropes = decoder_rope_tables(config)

    def __iter__(self) -> Iterator[tuple[int, DecoderBlock]]:
        for i in range(self._config.layers):
            block = build_block(self._config, i, self._weights, torch.float32, torch.device("cpu"))
            yield i, block
            if self.states is not None:
                self.states = run_block(self._config, self._ropes, i, block, self.states)
            self._weights.release_pages()

    def inputs(self, i: int, block: DecoderBlock) -> Mapping[Role, InputStatistics]:
        """Statistics of what the matrices of the block read."""
        return {} if self.states is None else collect(self._config, self._ropes, i, block, self.states)


def embedded(config: ModelConfig, weights: Weights, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
    """What the first block reads of tokens."""
    table = weights.require(EMBEDDING, config.vocab, config.hidden)
    return table[tokens].float() * config.embedding_scale


def run_block(
    config: ModelConfig, ropes: tuple[RopeTables, RopeTables], i: int, block: DecoderBlock, x: Float[Tensor, "b s d"]
) -> Float[Tensor, "b s d"]:
    """The output of block `i` for sequences, a few at a time."""
    rows = max(1, _BATCH_TOKENS // x.shape[1])
    with torch.inference_mode():
        return torch.cat([forward_blocks([block], config, ropes, part, i) for part in x.split(rows)])


class _Collector:
    """Sums over the inputs of a matrix."""

    def __init__(self) -> None:
        self.moment: Tensor | None = None
        self.magnitude: Tensor | float = 0.0
        self.count = 0

    def add(self, x: Tensor) -> None:
        flat = x.flatten(0, -2).float()
        if self.moment is None:
            self.moment = torch.zeros(flat.shape[1], flat.shape[1])
        self.moment.addmm_(flat.T, flat)
        self.magnitude = self.magnitude + flat.abs().sum(0)
        self.count += len(flat)

    def statistics(self) -> InputStatistics:
        assert self.moment is not None and isinstance(self.magnitude, Tensor)
        return InputStatistics(self.moment / self.count, self.magnitude / self.count)


def collect(
    config: ModelConfig, ropes: tuple[RopeTables, RopeTables], i: int, block: DecoderBlock, x: Float[Tensor, "b s d"]
) -> Mapping[Role, InputStatistics]:
    """Statistics of the inputs of a block's matrices."""
    collectors = {role: _Collector() for role in linears(block)}
    with observed(block, lambda role, x: collectors[role].add(x)):
        run_block(config, ropes, i, block, x)
    return {role: collector.statistics() for role, collector in collectors.items()}


@contextmanager
def observed(block: DecoderBlock, see: Callable[[Role, Tensor], None]) -> Iterator[None]:
    """While it lasts, `see` gets what the matrices of the block read."""
    with ExitStack() as hooks:
        for role, linear in linears(block).items():
            hook = linear.register_forward_pre_hook(lambda _, inputs, role=role: see(role, inputs[0]))
            hooks.callback(hook.remove)
        yield
