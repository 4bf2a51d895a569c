"""A network with its cache: forward passes over token trees, for targets and draft models."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import ModelOutput, count_experts
from foretell.core.tree import NodeMask, TokenTree
from foretell.model.block.backend import Backend
from foretell.model.block.decoder import BlockRange
from foretell.model.cache.attention_sums import AttentionSums
from foretell.model.cache.layout import Layout, index_marked
from foretell.model.run.network import Network
from foretell.model.run.runner import LimitsCache, PromptImages, ReadsImages, Runner
from foretell.utils.inference import in_inference_mode
from foretell.utils.transfer import to_device, to_host


class NetworkRunner(Runner, LimitsCache, ReadsImages):
    """A `Network` with its cache, layer by layer."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.cache = network.new_cache()
        self.vocab, self.context = network.config.vocab, network.config.context
        self._length: list[int] = []
        self._images: dict[int, PromptImages] = {}
        """What rows read in place of some tokens of their prompts."""
        self.attention_sums: AttentionSums | None = None
        """What every cached key has received of the softmax, where a cache policy needs it."""

    def record_attention(self) -> None:
        """Sum up from now on what every cached key receives of the softmax: passes get slower."""
        if self.attention_sums is None:
            self.attention_sums = AttentionSums(self.cache, self.network.config)

    @property
    def backend(self) -> Backend:
        """The network's."""
        return self.network.backend

    def length(self, row: int) -> int:
        """Number of committed tokens of a row."""
        return self._length[row] if row < len(self._length) else 0

    def slots(self, row: int) -> int:
        """Number of slots that the tokens of a row take."""
        return self.length(row)

    @torch.inference_mode()
    def _forward_layers(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        length: Sequence[int],
        active: NodeMask,
        scored: NodeMask | None,
        hidden_layers: Sequence[int],
    ) -> ModelOutput:
        """`forward` by the parts of the network."""
        layout, index = self._layout(tree, rows, length, active)
        if self.attention_sums is not None:
            layout = self.attention_sums.record(layout, rows, index)
        x = self.embed(tree.token[active], layout, probe_embeddings=tree.probe_embeddings)
        states, route_tensors = self._hidden_states(x, layout, hidden_layers)
        routes = tuple(layer.numpy() for layer in to_host(route_tensors))
        output = self._output(states, index, active, scored, hidden_layers, count_experts(routes))
        return replace(output, routes=routes) if routes else output

    def _layout(
        self, tree: TokenTree, rows: Sequence[int], length: Sequence[int], active: NodeMask
    ) -> tuple[Layout, Int[np.ndarray, "b n"]]:
        """The layout of the active nodes after the first `length` slots of their rows, and each node's index in it."""
        return Layout.from_tree(tree, rows, np.array(length), active)

    def _output(
        self,
        states: dict[int, Float[torch.Tensor, "t d"]],
        index: Int[np.ndarray, "b n"],
        active: NodeMask,
        scored: NodeMask | None,
        hidden_layers: Sequence[int],
        expert_counts: tuple[int, ...],
    ) -> ModelOutput:
        """Logits of the scored nodes from the last block's outputs, by `index`."""
        logit_index, layers = index, self.network.config.layers
        head_input = states.get(layers + 1, states[layers])
        if scored is not None and scored is not active:
            wanted = active & scored
            logit_index = index_marked(wanted)
            head_input = head_input[to_device(index[wanted], head_input.device)]
        if layers + 1 not in states:
            head_input = self.network.final_norm(head_input)
        logits = self.network.logits(head_input) if len(head_input) else head_input.new_zeros(0, self.vocab)
        hidden = tuple(states[layer] for layer in hidden_layers)
        return ModelOutput(logits, logit_index, hidden, index, experts=expert_counts)

    def show(self, row: int, images: PromptImages | None) -> None:
        """Let a row read these images; see `ReadsImages.show`."""
        self._images.pop(row, None)
        if images is not None:
            self._images[row] = images

    def reads_images(self, rows: Sequence[int]) -> bool:
        """Whether one of the rows has yet to read an image."""
        shown = ((self._images.get(row), self.length(row)) for row in rows) if self._images else ()
        return any(images is not None and images.positions[-1] >= length for images, length in shown)

    def embed(
        self,
        token: Int[np.ndarray, " t"],
        layout: Layout,
        network: Network | None = None,
        probe_embeddings: Float[torch.Tensor, "e d"] | None = None,
    ) -> Float[torch.Tensor, "t d"]:
        """Input of the first block of a network (None: the own one) for the tokens of a layout: their embeddings, or
        what their row reads of an image in their place. Ids from the vocabulary's size on index `probe_embeddings`.

        Raises:
            ValueError: the layers read more of a token than its embedding.
        """
        network = self.network if network is None else network
        if probe_embeddings is None:
            x = network.embed(torch.from_numpy(token))
        else:
            x = self._embed_probes(token, probe_embeddings)
        if not self._images:
            return x
        row, position = layout.row.numpy(), layout.position.numpy()
        for each in set(row.tolist()).intersection(self._images):
            images = self._images[each]
            token_index = np.flatnonzero((row == each) & np.isin(position, images.positions))
            if len(token_index):
                place = np.searchsorted(images.positions, position[token_index])
                embeddings = images.embeddings[torch.from_numpy(place)].to(x)
                x[to_device(token_index, x.device)] = embeddings
        return x

    def _embed_probes(
        self, token: Int[np.ndarray, " t"], probe_embeddings: Float[torch.Tensor, "e d"]
    ) -> Float[torch.Tensor, "t d"]:
        if self.network.config.layer_inputs is not None:
            raise ValueError(
                f"trained prompt tokens need a model that reads an embedding per token alone, and the layers of this "
                f"one ({self.network.config.architecture}) read inputs of their own; use another method"
            )
        probe = token >= self.vocab
        x = self.network.embed(torch.from_numpy(np.where(probe, 0, token)))
        index = to_device(token[probe] - self.vocab, probe_embeddings.device)
        x[to_device(np.flatnonzero(probe), x.device)] = probe_embeddings[index].to(x)
        return x

    def _hidden_states(
        self, x: Float[torch.Tensor, "t d"], layout: Layout, hidden_layers: Sequence[int]
    ) -> tuple[dict[int, Float[torch.Tensor, "t d"]], tuple[Int[torch.Tensor, "t k"], ...]]:
        """The requested hidden states and the last block's output, by layer; and the experts of every token per
        mixture-of-experts layer.
        """
        layers = self.network.config.layers
        blocks = BlockRange(0, layers, tuple(i for i in sorted(set(hidden_layers)) if i < layers))
        output = self.network.run(x, layout, self.cache, blocks)
        states = dict(zip((*blocks.hidden_layers, layers), output.hidden_states, strict=True))
        if layers + 1 in hidden_layers:
            states[layers + 1] = self.network.final_norm(states[layers])
        return states, output.routes

    def _reserve(self, rows: Sequence[int], nodes: int) -> None:
        """Make room for so many nodes after the tokens of each row."""
        self._length += [0] * (max(rows) + 1 - len(self._length))
        self.cache.reserve(rows, [self.slots(row) + nodes for row in rows])

    def _reserve_active(self, rows: Sequence[int], active: NodeMask) -> None:
        """Make room for the nodes of a pass: beside a prompt, the other rows take no room for as many as it has."""
        self._length += [0] * (max(rows) + 1 - len(self._length))
        last = (active.shape[1] - active[:, ::-1].argmax(1)) * active.any(1)
        self.cache.reserve(rows, [self.slots(row) + n for row, n in zip(rows, last.tolist(), strict=True)])

    @in_inference_mode
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree as the row's next tokens."""
        slots = self.slots(row)
        self.cache.keep(row, slots, path)
        if self.attention_sums is not None:
            self.attention_sums.commit(row, path, slots)
        self._length[row] += len(path)

    @torch.inference_mode()
    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on; see `Runner.truncate`."""
        if row < len(self._length):
            self._length[row] = self.restorable(row, length)
            self.cache.truncate(row, self.slots(row))
            if self.attention_sums is not None:
                self.attention_sums.truncate(row, self.slots(row))

    def restorable(self, row: int, length: int) -> int:
        """The number of tokens that `truncate(row, length)` leaves."""
        return self.cache.restorable(row, min(length, self.length(row)))

    def limit_cache(self, nbytes: int) -> None:
        """Limit the memory of the cache; see `LimitsCache.limit_cache`."""
        self.cache.limit(nbytes)

    @property
    def cache_bytes(self) -> int:
        """Memory of the key-value cache."""
        return self.cache.nbytes

    @property
    def free_tokens(self) -> int | None:
        """Tokens that the cache has room for without forgetting others; None: any number."""
        return self.cache.free_slots
