"""Options of the methods that decode several positions in one pass."""

from typing import Annotated

from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.options.draft_model import DraftModelOptions
from foretell.catalogue.options.fields import TrieConfidence, VectorCount, WindowSize, option


class LookaheadOptions(MethodOptions):
    """Lookahead decoding, with TensorRT-LLM's names."""

    max_window_size: Annotated[int, option("Columns of the window (W).", ge=1, le=64)] = 7
    max_ngram_size: Annotated[int, option("Tokens of an n-gram (N).", ge=2, le=32)] = 5
    max_verification_set_size: Annotated[
        int | None, option("Most n-grams verified per pass (G). Unset: as many as columns.", ge=0, le=64)
    ] = None
    num_speculative_tokens: Annotated[
        int | None, option("Most nodes of the trie of verified n-grams. Unset: G (N - 1).", ge=0, le=256)
    ] = None
    confidence_threshold: TrieConfidence = 0.0


class JacobiOptions(MethodOptions):
    """Jacobi decoding."""

    max_window_size: WindowSize = 8
    confidence_threshold: TrieConfidence = 0.0


class GaussSeidelJacobiOptions(JacobiOptions):
    """Jacobi decoding with one block after another."""

    max_window_size: WindowSize = 3


class LookAheadEmbeddingsOptions(DraftModelOptions):
    """PaSS: look-ahead embeddings."""

    num_speculative_tokens: VectorCount = None  # type: ignore[assignment]
    look_ahead_groups: Annotated[
        int,
        option(
            "Nodes of the draft tree that get look-ahead embeddings; 0: every second pass reads only look-ahead "
            "embeddings, as in the paper.",
            ge=0,
        ),
    ] = 2
