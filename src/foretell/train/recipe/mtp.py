"""Layers of multi-token prediction, new or the checkpoint's (arXiv 2412.19437, 2509.18362), and Gemma 4's assistant."""

from dataclasses import replace
from typing import Self

import torch
from pydantic import Field
from torch import nn

from foretell.catalogue.feature_level import feature_method, mtp_method
from foretell.catalogue.options.feature_level import EagleTreeOptions
from foretell.draft import AssistantDrafter
from foretell.engine.method import AnyMethod
from foretell.model.load.assistant import assistant_config
from foretell.model.load.mtp import layers_like
from foretell.model.training.full_forward import CausalAttention
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.mtp import AssistantConfig, AssistantNetwork, MTPConfig, MTPNetwork
from foretell.train.data.batch import Batch
from foretell.train.data.features import compute_hidden_states
from foretell.train.objective.unrolled import top1_agreement, unrolled_loss
from foretell.train.recipe.base import MAX_COUNT, MEASURE_TREE_NODES, LabelledRecipe, LabelOptions, Loss, RecipeSetup
from foretell.train.recipe.eagle import sample_positions
from foretell.train.recipe.init_from_target import EMBEDDING_SHARE, OUTPUT_SCALE, at_least, root_mean_square
from foretell.utils.validation import Fields

_RECURSIVE_STEPS = 3
"""Steps of a single layer on its own outputs (FastMTP's)."""
_ASSISTANTS_LAYERS, _WIDTH, _FFN_FACTOR = 4, 256, 8
_POST_NORM = 0.2
"""What the layers of a new assistant add at first to a stream of size 1."""


class MTPTraining(LabelOptions):
    """Options of `--set`."""

    layers: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Layers, each of which predicts a token further; unset: as many as the target's checkpoint has, else 1."""
    steps: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Tokens that are learned after each position; unset: as many as layers, and for one layer 3."""
    positions: int = Field(4096, ge=1)
    """Maximum number of random positions of a batch at which the loss is computed."""
    decay: float = Field(0.6, gt=0, le=1)
    """Weight of a step's loss relative to that of the previous step."""


class MTPRecipe(LabelledRecipe):
    """The target's distributions of the tokens after the next one, layer by layer, with the text's tokens in between.

    The training begins with the layers of the target's checkpoint, if it has any; else with copies of its last block.
    """

    name = "mtp"
    network: Speculator

    def __init__(self, setup: RecipeSetup, network: MTPNetwork | AssistantNetwork, options: MTPTraining) -> None:
        self.network, self.config, self.options = network, network.config, options
        self._setup, self._embedding_and_head = setup, setup.embedding_and_head
        self._steps = options.steps or (network.layers if network.layers > 1 else _RECURSIVE_STEPS)
        if 1 < network.layers < self._steps:
            raise ValueError(
                f"--set steps={self._steps}: {network.layers} layers predict one token each; only a single layer "
                "predicts more"
            )

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Copy the layers of the target's checkpoint, else its last block.

        Raises:
            ValueError: unknown options, or values that do not fit the target.
        """
        o = setup.parse_options(MTPTraining)
        published = [] if setup.checkpoint is None else setup.checkpoint.prediction_layers()
        model = layers_like(setup.config, o.layers or len(published) or 1)
        network = setup.create_network(MTPNetwork, setup.configuration(MTPConfig, o, model=model))
        recipe = cls(setup, network, o)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(setup.seed)
            if published:
                network.init_from_layers(published)
            else:
                init_from_last_block(network, setup)
        return recipe

    @property
    def draft_length(self) -> int:
        """Tokens that it learns after each position."""
        return self._steps

    def inputs(self, batch: Batch) -> tuple[object, ...]:
        """What the network reads: tokens, and inputs of the target's head."""
        return batch.token, self.head_states(batch)

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The weighted sum over the steps."""
        o = self.options
        labels = self.target_labels(batch, sample_positions(batch.loss_mask, o.positions)).with_candidates(o.candidates)
        steps = [labels.shifted(1 + i) for i in range(self._steps)]
        states = network(*self.inputs(batch), [mask for mask, _ in steps])
        pairs = [
            (self.network.compute_logits(state, labels.candidates), target)
            for state, (_, target) in zip(states, steps, strict=True)
        ]
        metrics = {f"step {i + 1} top 1": top1_agreement(q.detach(), p) for i, (q, p) in enumerate(pairs)}
        return Loss(unrolled_loss(pairs, o.decay, o.hard, o.objective), metrics | {"covered": labels.covered})

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily."""
        assert isinstance(network, MTPNetwork)
        return mtp_method(network.to_layer(), EagleTreeOptions(num_draft_tokens=MEASURE_TREE_NODES))


def init_from_last_block(network: MTPNetwork, setup: RecipeSetup) -> None:
    """The target's last block, whose outputs are scaled down, and the hidden state itself as its input, with noise that
    depends on the token; without a checkpoint random weights.
    """
    d, last = network.target_info.hidden, setup.last_blocks(1)
    scales = torch.ones(d) if last is None else at_least(last.norm.weight, 0.1)
    network.init_random()
    for block, part in zip(network.blocks, network.parts, strict=True):
        part.combine.weight[:, :d] = torch.randn(d, d) * EMBEDDING_SHARE / d**0.5
        part.combine.weight[:, d:] = torch.diag(root_mean_square(scales) / scales)
        if last is not None:
            part.norm.weight.copy_(last.norm.weight)
            block.load_state_dict(last.blocks[-1].state_dict())
            for name, parameter in block.named_parameters():
                if name.startswith("output.") or "down." in name:
                    parameter.mul_(OUTPUT_SCALE)


class AssistantTraining(MTPTraining):
    """Options of `--set`; 4 layers unless set, the last one with full attention, the others with a window."""

    hidden: int | None = Field(None, ge=1)
    """Width, that of the feed-forward networks is eight times as large; unset: 256, or the target's if less."""


class AssistantRecipe(MTPRecipe):
    """Steps on the target's keys and values, as in drafting. Google has not published how its assistants were trained;
    the loss is that of layers of multi-token prediction.
    """

    name = "assistant"
    network: AssistantNetwork

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build an assistant, which drafts every token, from the target's head.

        Raises:
            ValueError: unknown options, or values or a target that do not fit.
        """
        o, target = setup.parse_options(AssistantTraining), setup.config
        layers, hidden = o.layers or _ASSISTANTS_LAYERS, o.hidden or min(_WIDTH, target.hidden)
        if hidden > target.hidden:
            raise ValueError(f"--set hidden={hidden}: an assistant is at most as wide as its target ({target.hidden})")
        own = replace(
            target, hidden=hidden, layers=layers, ffn=_FFN_FACTOR * hidden, reader_ffn=0, experts=None,
            layer_inputs=None, window_layers=tuple(range(layers - 1)) if target.window_layers else (),
        )  # fmt: skip
        model = assistant_config(Fields({"backbone_hidden_size": target.hidden}, "train assistant"), own, target)
        whole = replace(setup, draft_tokens=None)
        network = whole.create_network(AssistantNetwork, whole.configuration(AssistantConfig, o, model=model))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.seed)
            init_from_head(network, setup)
        return cls(setup, network, o)

    def inputs(self, batch: Batch) -> tuple[object, ...]:
        """Also keys and values, which the target computes here, without a gradient."""
        c, target = self.network.model, self._setup.decoder
        attention = CausalAttention(target.config)
        compute_hidden_states(target, batch.token, [max(c.kv_layers) - c.layers + 1], attention)
        return *super().inputs(batch), {layer: attention.kept[layer - c.layers] for layer in c.kv_layers}

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily."""
        assert isinstance(network, AssistantNetwork)
        assistant = network.to_assistant(self._setup.network or self._setup.decoder)
        return feature_method(AssistantDrafter(assistant), EagleTreeOptions(num_draft_tokens=MEASURE_TREE_NODES))

    def usage(self, out: str) -> str:
        """The method that drafts with an assistant."""
        return f"--method mtp --draft-model {out}"


@torch.no_grad()
def init_from_head(network: AssistantNetwork, setup: RecipeSetup) -> None:
    """The target's head and state, in the directions that change its logits most, and the norms of its queries; other
    matrices are noise.
    """
    c, d, decoder = network.model, network.target_info.hidden, setup.decoder
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
        elif "post_" in name:
            parameter.fill_(_POST_NORM)
    head, embedding = (t.float().cpu() for t in (setup.embedding_and_head.head, setup.embedding_and_head.embedding))
    down = torch.linalg.eigh(head.T @ head).eigenvectors[:, -c.hidden :]
    size = root_mean_square(decoder.norm.weight.cpu()) * (d / c.hidden) ** 0.5
    network.lm_head.copy_(head @ down)
    network.project.weight.copy_(down)
    network.norm.weight.fill_(float(size))
    network.combine.weight[:, :d] *= EMBEDDING_SHARE * 2**0.5 / network.embedding_scale / root_mean_square(embedding)
    network.combine.weight[:, d:] = down.T / size
    for block, layer in zip(network.blocks, c.kv_layers, strict=True):
        source = decoder.blocks[layer - c.layers].get_submodule("q_norm")
        block.get_submodule("q_norm").load_state_dict(source.state_dict())
