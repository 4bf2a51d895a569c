"""The stages of an MLP speculator on the native kernels: one of them, or whole trees by confidence, in one call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.model.kernels import build, structures
from foretell.model.kernels.beam import Trees
from foretell.model.kernels.linear import NativeLinear, embedding_of, expect
from foretell.model.kernels.structures import PRECISIONS


class NativeStage:
    """A stage of a multi-stage MLP speculator in one call: project, add the token, norm, GELU, and the two products
    that make its scores.

    All layers are of one precision; `norm` is scale and shift, float32 [inner] each.
    """

    def __init__(
        self,
        layers: tuple[NativeLinear, NativeLinear, NativeLinear, NativeLinear],
        norm: tuple[Tensor, Tensor],
        eps: float,
    ) -> None:
        self._kernels, self.layers, self._norm = build.library(), layers, [p.detach().float() for p in norm]
        self._struct = structures.Stage(*(x.struct for x in layers), *(p.data_ptr() for p in self._norm), eps)

    @property
    def struct(self) -> structures.Stage:
        """For the kernels; points into memory that lives as long as this stage."""
        return self._struct

    def __call__(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 states [t, in] and embeddings [t, d] to the next states [t, inner] and scores [t, outputs]."""
        project, token, _, head = self.layers
        expect(state, torch.float32, "state", state.shape[0], project.inputs)
        expect(embedded, torch.float32, "embedded", state.shape[0], token.inputs)
        following = torch.empty(len(state), project.outputs)
        scores = torch.empty(len(state), head.outputs)
        self._kernels.foretell_stage(
            *(PRECISIONS.index(project.precision), self._struct, state.data_ptr(), embedded.data_ptr()),
            *(following.data_ptr(), scores.data_ptr(), len(state), torch.get_num_threads()),
        )
        return following, scores


class NativeStages:
    """All stages in order, with the embedding of tokens, [vocab, hidden], that they see (Wertheimer et al., arXiv
    2404.19124).

    `token_of`: the token of each score, int64; None: its number.
    """

    def __init__(self, stages: Sequence[NativeStage], table: Tensor, scale: float, token_of: Tensor | None) -> None:
        self._stages, self._token_of, self._kernels = stages, token_of, build.library()
        self._table, self._embedding = embedding_of(table, scale)
        self._structs = (structures.Stage * len(stages))(*(stage.struct for stage in stages))

    def __getitem__(self, stage: int) -> NativeStage:
        return self._stages[stage]

    def beam(self, start: Tensor, root: Tensor, trees: Trees) -> None:
        """Grow trees below root tokens, int64 [b], each produced by a state, float32 [b, in].

        Raises:
            ValueError: a token that is none, or trees deeper than there are stages.
        """
        project, *_ = self._stages[0].layers
        b = trees.struct
        expect(start, torch.float32, "start", b.texts, project.inputs)
        expect(root, torch.int64, "root", b.texts)
        if b.depth > len(self._stages) or not 0 <= int(root.min()) <= int(root.max()) < self._embedding.vocab:
            raise ValueError(
                f"there are {len(self._stages)} stages and {self._embedding.vocab} tokens; {b.depth} levels below "
                f"{root.tolist()} were asked for"
            )
        self._kernels.foretell_stages_beam(
            *(PRECISIONS.index(project.precision), self._structs, self._embedding),
            *(None if self._token_of is None else self._token_of.data_ptr(), start.data_ptr(), root.data_ptr(), b),
            *(*trees.out, torch.get_num_threads()),
        )
