"""MLP speculators (Wertheimer et al., arXiv 2404.19124) on the kernels: one stage, or whole dynamic trees, per call."""

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from foretell.model.kernels import build, structures
from foretell.model.kernels.dynamic_tree import DynamicTrees
from foretell.model.kernels.linear import NativeLinear, check_tensor, pack_embedding


class NativeStage:
    """One stage of an MLP speculator: project the state, add the token, norm, GELU, output, head.

    All layers have one precision; `norm` is scale and shift, float32 [inner] each.
    """

    def __init__(
        self,
        layers: tuple[NativeLinear, NativeLinear, NativeLinear, NativeLinear],
        norm: tuple[Tensor, Tensor],
        eps: float,
    ) -> None:
        self._kernels, self.layers, self._norm = build.library(), layers, [p.detach().float() for p in norm]
        project, token, output, head = (layer.struct for layer in layers)
        self._struct = structures.make(
            structures.Stage,
            project=project,
            token=token,
            output=output,
            head=head,
            norm_weight=self._norm[0].data_ptr(),
            norm_bias=self._norm[1].data_ptr(),
            eps=eps,
        )

    @property
    def struct(self) -> structures.Stage:
        """The argument of the kernels; points into memory that this stage owns."""
        return self._struct

    def __call__(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """From float32 states [t, in] and embeddings [t, d] to the next states [t, inner] and logits [t, outputs]."""
        project, token, _, head = self.layers
        check_tensor(state, torch.float32, "state", state.shape[0], project.inputs)
        check_tensor(embedded, torch.float32, "embedded", state.shape[0], token.inputs)
        next_state = torch.empty(len(state), project.outputs)
        logits = torch.empty(len(state), head.outputs)
        self._kernels.foretell_mlp_speculator_stage(
            self._struct,
            state.data_ptr(),
            embedded.data_ptr(),
            next_state.data_ptr(),
            logits.data_ptr(),
            len(state),
            torch.get_num_threads(),
        )
        return next_state, logits


class NativeStages:
    """All stages in order, with their token embedding `table`, [vocab, hidden], and its scale.

    `token_of`: the token of each output of the head, int64; None: the output's index.
    """

    def __init__(self, stages: Sequence[NativeStage], table: Tensor, scale: float, token_of: Tensor | None) -> None:
        self._stages, self._token_of, self._kernels = stages, token_of, build.library()
        self._table, self._embedding = pack_embedding(table, scale)
        self._structs = (structures.Stage * len(stages))(*(stage.struct for stage in stages))

    def __getitem__(self, stage: int) -> NativeStage:
        return self._stages[stage]

    def grow_dynamic_trees(self, start: Tensor, root: Sequence[int], trees: DynamicTrees) -> None:
        """Grow trees below the root tokens `root`, one per request, that the states `start`, float32 [b, in], produced.

        Raises:
            ValueError: a token is out of the vocabulary, or the trees are deeper than there are stages.
        """
        project, *_ = self._stages[0].layers
        b = trees.struct
        check_tensor(start, torch.float32, "start", b.requests, project.inputs)
        known = len(root) == b.requests and 0 <= min(root) <= max(root) < self._embedding.vocab
        if b.depth > len(self._stages) or not known:
            raise ValueError(
                f"there are {len(self._stages)} stages and {self._embedding.vocab} tokens; {b.depth} levels below "
                f"{list(root)} were asked for"
            )
        self._kernels.foretell_mlp_speculator_trees(
            self._structs,
            self._embedding,
            None if self._token_of is None else self._token_of.data_ptr(),
            start.data_ptr(),
            (c_int64 * len(root))(*root),
            b,
            torch.get_num_threads(),
        )
