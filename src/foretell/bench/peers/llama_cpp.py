"""llama.cpp as a peer, through llama-cpp-python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.bench.peers.base import LOOKUP_NGRAM, LOOKUP_TOKENS, ForwardBackend, Peer
from foretell.bench.timestamps import TokenTimer, TokenTimestamps

_BATCH = 512
"""Most tokens of one `llama_decode`."""


def import_llama_cpp() -> Any:
    """Import the package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import llama_cpp as package
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            "the peer llama.cpp is not installed; run: pip install 'foretell[peers]' (it compiles llama-cpp-python)"
        ) from error
    return package


def load(path: Path, context: int, threads: int, lookup: bool = False) -> Any:
    """Load a llama.cpp model; `lookup`: with the package's prompt lookup."""
    package = import_llama_cpp()
    draft = None
    if lookup:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(max_ngram_size=LOOKUP_NGRAM, num_pred_tokens=LOOKUP_TOKENS)
    return package.Llama(
        model_path=str(path),
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=draft,
        verbose=False,
    )


class LlamaCppPeer(Peer):
    """llama-cpp-python's `generate` at temperature 0; its cache is cleared before every prompt."""

    def __init__(self, model: Any, name: str = "llama.cpp") -> None:
        self.name, self._model = name, model

    def generate(self, prompt: Sequence[int], count: int) -> TokenTimestamps:
        """Generate exactly `count` tokens."""
        if len(prompt) + count > self._model.n_ctx():
            raise ValueError(
                f"{self.name}: {len(prompt)} + {count} tokens are more than its context of {self._model.n_ctx()}"
            )
        self._model.reset()
        self._model._ctx.kv_cache_clear()
        timer = TokenTimer()
        for token in self._model.generate(list(prompt), top_k=1, temp=0.0, repeat_penalty=1.0):
            timer.add([token])
            if len(timer.tokens) == count:
                break
        return timer.timestamps()


class LlamaCppForwardBackend(ForwardBackend):
    """`llama_decode` through the C interface, with logits for every token; nothing is copied into Python."""

    def __init__(self, model: Any, name: str = "llama.cpp") -> None:
        self.name, self._api = name, import_llama_cpp()
        self._model, self._ctx = model, model.ctx
        self._memory = self._api.llama_get_memory(self._ctx)
        self._batch = self._api.llama_batch_init(_BATCH, 0, 1)
        self._prefix_length = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read the prefix."""
        self._prefix_length = 0
        self.rollback()
        for start in range(0, len(tokens), _BATCH):
            self._decode(tokens[start : start + _BATCH], scored=False)
            self._prefix_length += len(tokens[start : start + _BATCH])

    def forward(self, tokens: Sequence[int]) -> None:
        """One pass over new tokens."""
        self._decode(tokens, scored=True)
        self._api.llama_get_logits(self._ctx)

    def rollback(self) -> None:
        """Remove the tokens after the prefix from the cache."""
        self._api.llama_memory_seq_rm(self._memory, 0, self._prefix_length, -1)

    def _decode(self, tokens: Sequence[int], scored: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self._prefix_length + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = scored or i == len(tokens) - 1
        if self._api.llama_decode(self._ctx, batch):
            raise ValueError(
                f"{self.name}: llama.cpp could not read {len(tokens)} tokens after {self._prefix_length}; is its "
                "context large enough?"
            )
