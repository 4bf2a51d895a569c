"""Which text the layers of a transformers model see: all of it, a sliding window, or the chunk of a token.

Configurations say it in several ways, and classes read them each in their own. So the model is asked: it makes masks in
a pass of its own, and the kinds of those are the ones that it is given for token trees.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int

Tensor = torch.Tensor
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_KINDS = {
    "create_causal_mask": _FULL,
    "create_sliding_window_causal_mask": _SLIDING,
    "create_chunked_causal_mask": _CHUNKED,
}
"""What the functions make by which models of transformers make their masks."""
_SIZES = {_SLIDING: "sliding_window", _CHUNKED: "attention_chunk_size"}
"""Where these functions read the size of a window or a chunk."""
_SIZE = re.compile("window|chunk|local")
"""In names of such sizes, by whatever name a class reads them."""
_NARROW = 3
"""Tokens of a window in a check."""
_known: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()
"""Kinds of the masks of a model."""


class LayerMasks:
    """The masks of a model's layers for token trees.

    Raises:
        ValueError: some layers see a window that is counted in places of the cache.
    """

    def __init__(self, model: Any) -> None:
        self._config = model.config.get_text_config()
        values = self._config.to_dict()
        lists = [value for value in values.values() if isinstance(value, list | tuple)]
        if any(isinstance(x, str) and x.startswith("local") for value in lists for x in value):
            raise ValueError(
                f"{type(model).__name__} cannot read token trees: its local attention counts places of the cache"
            )
        self.names = [n for n, v in values.items() if _SIZE.search(n) and type(v) is int and v > _NARROW]
        """Keys of the configuration that may be sizes of windows."""
        if model not in _known:
            _known[model] = _made_kinds(model) if self.names or values.get("layer_types") else frozenset((_FULL,))
        self._kinds = _known[model]

    def of(
        self, visible: Bool[Tensor, "n k"], nodes: Int[Tensor, " n"], keys: Int[Tensor, " k"], dtype: torch.dtype
    ) -> Float[Tensor, "1 1 n k"] | Mapping[str, Float[Tensor, "1 1 n k"]]:
        """The mask of all layers, or one of each kind: 0 where a node sees a key, else the least number.

        `visible`: keys that precede a node in its text. `nodes`, `keys`: positions in the text.
        """
        masks = {kind: _mask(visible & self._near(kind, nodes, keys), dtype) for kind in self._kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _near(self, kind: str, nodes: Int[Tensor, " n"], keys: Int[Tensor, " k"]) -> Bool[Tensor, "n k"]:
        at, key = nodes[:, None], keys[None]
        size = getattr(self._config, _SIZES.get(kind, ""), None)
        if size is None:
            return torch.ones(len(nodes), len(keys), dtype=torch.bool)
        return key > at - size if kind == _SLIDING else key // size == at // size

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """With windows of a few tokens, where a model reads their sizes at every pass."""
        with ExitStack() as stack:
            for name in self.names:
                stack.callback(setattr, self._config, name, getattr(self._config, name))
                setattr(self._config, name, _NARROW)
            yield


def _mask(visible: Bool[Tensor, "n k"], dtype: torch.dtype) -> Float[Tensor, "1 1 n k"]:
    mask = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype)
    return mask.masked_fill_(visible, 0)[None, None]


def _made_kinds(model: Any) -> frozenset[str]:
    """The kinds of masks that a model makes in a pass of its own."""
    made = set[str]()

    def record(make: Any, kind: str, *arguments: Any, **options: Any) -> Any:
        made.add(kind)
        return make(*arguments, **options)

    with ExitStack() as stack, torch.inference_mode():
        for module in {sys.modules[type(part).__module__] for part in model.modules()}:
            for name, kind in _KINDS.items():
                make = getattr(module, name, None)
                if make is not None:
                    stack.callback(setattr, module, name, make)
                    setattr(module, name, partial(record, make, kind))
        own_pass(model, (0, 0))
    return frozenset(made) or frozenset((_FULL,))


@torch.inference_mode()
def own_pass(model: Any, tokens: Sequence[int]) -> Float[Tensor, "n v"]:
    """Logits of a text as the model reads it without a mask and a cache."""
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False).logits
    return logits[0]
