"""Runs causal language models of the transformers library: for architectures that foretell's decoder does not support,
and as the reference in tests.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch.utils._pytree import tree_map

from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.model.block.backend import Backend
from foretell.model.block.linear import widen
from foretell.model.cache.layout import index_marked
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.values import eos_token_ids
from foretell.model.load.transformers_masks import LayerMasks, own_pass
from foretell.model.run.runner import Layers, Marks, PromptImages, ReadsImages, Rows, Runner
from foretell.utils.validation import Fields

_TREE_TOLERANCE = 0.05
"""Of the largest logit; above the rounding errors of bfloat16."""


def import_transformers(purpose: str = "this model's architecture runs through transformers") -> Any:
    """The transformers library; `purpose`: what needs it, for the message.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{purpose}, which is missing: pip install foretell[hf]") from error
    return transformers


def cache_argument(model: Any) -> str:
    """The name of the parameter by which `model.forward` takes its key-value cache: `cache` since transformers 5.24,
    `past_key_values` before.

    Raises:
        ValueError: it takes none.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ValueError(f"{type(model).__name__} cannot read token trees: it takes no key-value cache")


@dataclass
class _Row:
    """The cache of one batch row (a `DynamicCache`): committed tokens, then the nodes of the current tree in the order
    in which they ran.
    """

    cache: Any
    length: int = 0
    nodes: list[int] = field(default_factory=list)

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes, in order, as the next tokens; forget the others."""
        slot = {node: self.length + i for i, node in enumerate(self.nodes)}
        self._select([*range(self.length), *(slot[node] for node in path)])

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        self._select(range(min(length, self.length)))

    def _select(self, slots: Sequence[int]) -> None:
        if list(slots) != list(range(self.length + len(self.nodes))):
            for layer in self.cache.layers:
                if layer.is_initialized:
                    index = torch.tensor(list(slots), dtype=torch.long, device=layer.keys.device)
                    layer.keys, layer.values = layer.keys.index_select(2, index), layer.values.index_select(2, index)
        self.length, self.nodes = len(slots), []


class HFRunner(Runner, ReadsImages):
    """Runs a `PreTrainedModel` with a head, one batch row at a time; trees by 4-D masks and position ids.

    Raises:
        ValueError: the model cannot run trees: it takes no position ids, has a recurrent state instead of a key-value
            cache, or windows that are counted in places of the cache.
    """

    def __init__(self, model: Any) -> None:
        name = type(model).__name__
        positions = "position_ids" in inspect.signature(model.forward).parameters
        if not positions or model._is_stateful:
            raise ValueError(f"{name} cannot read token trees: it needs position ids, and keys and values in a cache")
        self._cache_argument = cache_argument(model)
        self.masks = LayerMasks(model.eval())
        self.model = model
        self.config = model_config_of(model)
        self.vocab, self.context = self.config.vocab, self.config.context
        self._rows: dict[int, _Row] = {}
        self._images: dict[int, PromptImages | None] = {}

    @property
    def backend(self) -> Backend:
        """Transformers, in the model's dtype."""
        return Backend("transformers", self.model.device.type, str(self.model.dtype).removeprefix("torch."))

    def length(self, row: int) -> int:
        """Number of committed tokens of a row."""
        return self._rows[row].length if row in self._rows else 0

    @torch.inference_mode()
    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Run nodes of a tree; see `Runner.forward`.

        Raises:
            ValueError: as `check`.
        """
        self.check(tree, hidden_layers)
        active = tree.active if active is None else active
        wanted = active if scored is None else active & scored
        outputs = [
            self._run(row, tree, i, np.nonzero(active[i])[0].tolist(), bool(hidden_layers))
            for i, row in enumerate(rows)
            if active[i].any()
        ]
        logits = torch.cat([o.logits[0] for o in outputs])
        hidden_states = tuple(
            torch.cat([o.hidden_states[min(t, self.config.layers)][0] for o in outputs]) for t in hidden_layers
        )
        chosen = torch.from_numpy(wanted[active]).to(logits.device)
        return ModelOutput(widen(logits[chosen]), index_marked(wanted), hidden_states, index_marked(active))

    def check(self, tree: TokenTree, hidden_layers: Layers) -> None:
        """Check that transformers can run this tree and return these hidden states.

        Raises:
            ValueError: the last block's output before the final norm is asked for, which transformers does not return;
                or the tree has probe embeddings.
        """
        if self.config.layers in hidden_layers:
            raise ValueError(
                "transformers does not return the last block's output before the final norm; use another hidden layer"
            )
        if tree.probe_embeddings is not None:
            raise ValueError(
                "this method passes embeddings to the target, which needs foretell's own decoder: use another method"
            )

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            self._rows[row] = _Row(import_transformers().DynamicCache())
        return self._rows[row]

    def show(self, row: int, images: PromptImages | None) -> None:
        """Let a row read these images; see `ReadsImages.show`."""
        self._images[row] = images

    def _run(self, number: int, tree: TokenTree, i: int, nodes: list[int], hidden_states: bool) -> Any:
        """One forward pass over nodes of row `i` of the tree, in the row of this number of the cache. A node that ran
        already means that this is a new tree.
        """
        row = self._row(number)
        if not set(nodes).isdisjoint(row.nodes):
            row.crop(row.length)
        row.nodes += nodes
        slot = {node: row.length + j for j, node in enumerate(row.nodes)}
        dtype, device = self.model.dtype, self.model.device
        visible = torch.zeros(len(nodes), row.length + len(row.nodes), dtype=torch.bool)
        visible[:, : row.length] = True
        for j, node in enumerate(nodes):
            visible[j, [slot[a] for a in tree.ancestors(i, node)]] = True
        positions = row.length + tree.depth[i, nodes]
        keys = np.concatenate([np.arange(row.length), row.length + tree.depth[i, row.nodes]])
        mask = self.masks.of(visible, torch.from_numpy(positions), torch.from_numpy(keys), dtype)
        images = self._images.get(number)
        axes = positions if images is None or images.axes is None else images.axes_at(positions)
        return self.model(
            **self._inputs(tree.token[i, nodes], positions, images),
            position_ids=torch.from_numpy(axes)[..., None, :].to(device),
            attention_mask=tree_map(lambda m: m.to(device), mask),
            use_cache=True,
            output_hidden_states=hidden_states,
            **{self._cache_argument: row.cache},
        )

    def _inputs(
        self, tokens: Int[np.ndarray, " n"], positions: Int[np.ndarray, " n"], images: PromptImages | None
    ) -> dict[str, torch.Tensor]:
        """The tokens, or where there are images their embeddings with those of the images in their places."""
        ids = torch.from_numpy(tokens)[None].to(self.model.device)
        if images is None:
            return {"input_ids": ids}
        embeddings = self.model.get_input_embeddings()(ids).clone()
        here = np.isin(positions, images.positions)
        place = torch.from_numpy(np.searchsorted(images.positions, positions[here]))
        embeddings[0, torch.from_numpy(here)] = images.embeddings[place].to(embeddings)
        return {"inputs_embeds": embeddings}

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree as the row's next tokens."""
        self._row(row).commit(path)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        if row in self._rows:
            self._rows[row].crop(length)


def model_config_of(model: Any) -> ModelConfig:
    """The configuration of a transformers model, as far as foretell needs it."""
    config = model.config.get_text_config()
    values = config.to_dict()
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    return ModelConfig(
        architecture=str(config.model_type),
        vocab=int(config.vocab_size),
        hidden=hidden,
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        ffn=int(values.get("intermediate_size") or values.get("ffn_dim") or values.get("n_inner") or 4 * hidden),
        context=int(config.max_position_embeddings),
        rope=None,
        eos=eos_token_ids(Fields(values, "config.json")),
    )


def load_hf(path: Path, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """Load a causal or a vision-language model with transformers, and check that it runs token trees correctly.
    `options`: further ones of `from_pretrained`.

    Raises:
        ValueError: transformers is missing or cannot load the model, there is no safetensors file, a weight is missing,
            or the check fails.
    """
    model = _from_pretrained(import_transformers(), path, dtype, **options)
    try:
        runner = HFRunner(model.to(device))
        _check_trees(runner)
        _check_windows(runner)
    except ValueError:
        raise
    except Exception as error:  # As above.
        raise load_error(path, error) from error
    return model


def load_vision(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The vision encoder and the connector of a vision-language model, in a model whose decoder has no layers and one
    token.

    Raises:
        ValueError: as `load_hf`, but for the check.
    """
    transformers = import_transformers("images are read by transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
        if getattr(text, "layer_types", None):
            text.layer_types = []
    except Exception as error:  # Depends on the configuration.
        raise load_error(path, error) from error
    return _from_pretrained(transformers, path, dtype, config).to(device).eval()


def _from_pretrained(transformers: Any, path: Path, dtype: torch.dtype, config: Any = None, **options: Any) -> Any:
    """The model of a directory; `config`: another configuration, whose decoder has one token. `options`: further ones
    of `from_pretrained`.
    """
    try:
        with quiet(transformers):
            model, report = model_class(path)[0].from_pretrained(
                path,
                **({} if config is None else {"config": config}),
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except Exception as error:  # Depends on the architecture and on what is wrong with the configuration.
        raise load_error(path, error) from error
    for name, shape, wanted in sorted(report["mismatched_keys"]):
        if config is None or wanted[0] != 1:
            raise ValueError(f"{path}: {name} has shape {tuple(shape)}, the configuration asks for {tuple(wanted)}")
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{path}: the checkpoint has no {missing[0]}{more}, which transformers would fill with random numbers; is "
            "it complete?"
        )
    return model


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without bars and warnings of transformers, whose report about the weights is checked here instead."""
    logging = transformers.utils.logging
    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def reads_images(model: Any) -> bool:
    """Whether a model has a vision encoder before its decoder."""
    return getattr(model.config, "vision_config", None) is not None


def model_class(path: Path) -> tuple[Any, Any]:
    """The class that loads causal language models, or vision-language models, and the configuration."""
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if getattr(config, "vision_config", None) is not None:
        return transformers.AutoModelForImageTextToText, config
    return transformers.AutoModelForCausalLM, config


def load_error(path: Path, error: Exception) -> ValueError:
    """The error to raise after transformers failed to load the model in a directory."""
    if "trust_remote_code" in str(error):
        return ValueError(
            f"{path}: this model needs Python code from its checkpoint (auto_map in config.json), and foretell never "
            "runs code from a checkpoint; use a model whose architecture is part of transformers"
        )
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return ValueError(f"{path}: transformers cannot load this model ({reason})")


def _check_trees(runner: HFRunner) -> None:
    """Compare a child's logits beside a sibling and alone: equal if the model respects masks and positions."""
    first, second, third = 0, 1 % runner.vocab, 2 % runner.vocab
    in_tree = runner.forward([0], tree_from_lists([[first, second, third]], [[-1, 0, 0]])).logits[2]
    alone = runner.forward([1], tree_from_lists([[first, third]], [[-1, 0]])).logits[1]
    if (in_tree - alone).abs().max() > _TREE_TOLERANCE * alone.abs().max():
        raise ValueError(f"{type(runner.model).__name__} cannot read token trees: it ignores attention masks")


def _check_windows(runner: HFRunner) -> None:
    """Compare the logits of a text beyond the model's windows, which are made narrow for it, with the model's own."""
    if not runner.masks.names:
        return
    tokens = np.random.default_rng(0).integers(runner.vocab, size=9).tolist()
    with runner.masks.narrowed():
        own, runner_logits = own_pass(runner.model, tokens), list[torch.Tensor]()
        for part in (tokens[:5], tokens[5:]):
            runner_logits.append(runner.forward([2], tree_from_lists([part], [list(range(-1, len(part) - 1))])).logits)
            runner.commit(2, range(len(part)))
    difference = (torch.cat(runner_logits) - widen(own)).abs().max()
    if difference > _TREE_TOLERANCE * own.abs().max():
        raise ValueError(
            f"{type(runner.model).__name__} cannot read token trees: its layers see parts of the text "
            f"({', '.join(runner.masks.names)}) that its masks do not tell"
        )
