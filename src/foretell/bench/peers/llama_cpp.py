"""llama.cpp as a peer, through llama-cpp-python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.bench.peers.base import ForwardBackend, Peer
from foretell.bench.timestamps import TokenTimer, TokenTimestamps


def import_llama_cpp() -> Any:
    """The package.

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
    """A llama.cpp model; `lookup` gives it the package's prompt lookup (n-grams up to 3, 10 tokens)."""
    package = import_llama_cpp()
    draft = None
    if lookup:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=10)
    return package.Llama(
        model_path=str(path),
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=draft,
        verbose=False,
    )


class LlamaCppPeer(Peer):
    """llama-cpp-python's `generate` at temperature 0, its cache emptied before every prompt."""

    def __init__(self, model: Any, name: str = "llama.cpp") -> None:
        self.name, self._model = name, model

    def generate(self, prompt: Sequence[int], count: int) -> TokenTimestamps:
        """Exactly `count` tokens after the prompt."""
        if len(prompt) + count > self._model.n_ctx():
            raise ValueError(
                f"{self.name}: {len(prompt)} + {count} tokens are more than its context of {self._model.n_ctx()}"
            )
        self._model.reset()
        self._model._ctx.kv_cache_clear()
        clock = TokenTimer()
        for token in self._model.generate(list(prompt), top_k=1, temp=0.0, repeat_penalty=1.0):
            clock.add([token])
            if len(clock.tokens) == count:
                break
        return clock.timestamps()


class LlamaCppForwardBackend(ForwardBackend):
    """`llama_decode` over a batch of new tokens, all of them scored, through the C interface: nothing is copied into
    Python.
    """

    def __init__(self, model: Any, name: str = "llama.cpp") -> None:
        self.name, self._api = name, import_llama_cpp()
        self._model, self._ctx = model, model.ctx
        self._memory = self._api.llama_get_memory(self._ctx)
        self._batch = self._api.llama_batch_init(512, 0, 1)
        self._held = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read the text that every pass continues."""
        self._held = 0
        self.rollback()
        for start in range(0, len(tokens), 512):
            self._decode(tokens[start : start + 512], scored=False)
            self._held += len(tokens[start : start + 512])

    def forward(self, tokens: Sequence[int]) -> None:
        """One pass over new tokens."""
        self._decode(tokens, scored=True)
        self._api.llama_get_logits(self._ctx)

    def rollback(self) -> None:
        """Drop what the last pass added."""
        self._api.llama_memory_seq_rm(self._memory, 0, self._held, -1)

    def _decode(self, tokens: Sequence[int], scored: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self._held + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = scored or i == len(tokens) - 1
        if self._api.llama_decode(self._ctx, batch):
            raise ValueError(
                f"{self.name}: llama.cpp could not read {len(tokens)} tokens after {self._held}; is its context large "
                f"enough?"
            )
