"""Compresses a model, one block at a time, and writes it with a card; the output appears whole or not at all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from foretell.lab.compress import (
    ALLOCATIONS,
    LASER,
    LLM_PRUNER,
    LOW_RANK,
    METHODS,
    PRUNING,
    SHORTGPT,
    SLICEGPT,
    SPARSEGPT,
)
from foretell.lab.compress.allocation import OWL, measure_blocks, outlier_share, shares_by_outliers
from foretell.lab.compress.base import Compressor
from foretell.lab.compress.card import Card, write_card
from foretell.lab.compress.checkpoint import (
    ChangedBlocks,
    dtype_of,
    share_of_zeros,
    slice_tensors,
    tensors_of,
    unchanged,
    write_checkpoint,
)
from foretell.lab.compress.laser import SHARES, best_reduction
from foretell.lab.compress.llm_pruner import choose, importance, narrow_block, narrow_config, removals
from foretell.lab.compress.low_rank import check_share, ranks_of
from foretell.lab.compress.pruning import Magnitude
from foretell.lab.compress.slicing import kept_width, sliced_config
from foretell.lab.compress.sparsegpt import GROUP, SparseGPT
from foretell.lab.compress.sparsity import Pattern, Sparsity
from foretell.lab.compress.unfinished import UnfinishedResult, text_digest
from foretell.lab.quantize.base import Role, linears, set_matrix
from foretell.lab.quantize.calibration import CalibrationText, collect, embedded, run_block
from foretell.lab.quantize.directory import written_config
from foretell.lab.quantize.job import Source
from foretell.lab.quantize.layout import shapes_of
from foretell.model.block.decoder import decoder_rope_tables
from foretell.model.config.compressed import LowRank
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.pack import TWO_OF_FOUR_INPUTS
from foretell.model.load.build import build_block
from foretell.utils.names import unknown
from foretell.utils.unfinished import whole

Tensor = torch.Tensor
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """A method with its amount: of a method for matrices the compressor, of ShortGPT the number of blocks left out, of
    LASER the shares of a rank that it tries.
    """

    method: str
    amount: str
    compressor: Compressor | None = None
    dropped: int = 0
    shares: tuple[float, ...] = ()
    two_of_four: bool = False
    """Whether at most two of four consecutive weights stay."""
    ranks: LowRank = field(default_factory=LowRank)
    """Of matrices that become two factors."""
    form: ModelConfig | None = None
    """The configuration of a narrower model; None: that of the source."""
    removable: tuple[tuple[int, int], ...] = ()
    """Of LLM-Pruner, the numbers of heads and channels that may be removed from every block."""
    allocation: str = ""
    """What shares the amount out among the blocks; empty: all have the same."""
    by_block: tuple[Mapping[Role, Compressor], ...] = ()
    """The compressors of every block, where the amount is shared out."""

    @property
    def calibrated(self) -> bool:
        """Whether the method needs calibration text."""
        return self.compressor is None or self.compressor.calibrated or self.allocation == OWL


def plan(
    source: Source,
    method: str,
    sparsity: float | None,
    pattern: str | None,
    rank_share: float | None,
    bits: int | None = None,
    allocation: str | None = None,
) -> Plan:
    """Choose what is done.

    Raises:
        ValueError: an unknown method, an amount that is not the method's, or a model that it cannot compress.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    written_config(source.folder, source.config)
    if bits is not None and method != SPARSEGPT:
        raise ValueError(f"--bits rounds the weights that sparsegpt keeps, found --method {method}; leave it out")
    if allocation is not None:
        _check_allocation(method, allocation)
    given = {"--sparsity": sparsity, "--pattern": pattern, "--rank-share": rank_share}
    wanted = list(given)[: 1 if allocation else 2]
    if method in (*LOW_RANK, LASER):
        wanted = ["--rank-share"]
    elif method in (SHORTGPT, SLICEGPT, LLM_PRUNER):
        wanted = ["--sparsity"]
    named = [name for name, value in given.items() if value is not None]
    if method == LASER and named in ([], ["--rank-share"]):
        return _plan_reduction(rank_share)
    if len(named) != 1 or named[0] not in wanted:
        raise ValueError(f"--method {method} takes {' or '.join(wanted)}, found {' and '.join(named) or 'neither'}")
    if method == SHORTGPT:
        return _plan_blocks(source, Sparsity(sparsity or 0).share)
    if method == SLICEGPT:
        width = kept_width(source.config, sparsity or 0, source.name)
        amount = f"{width} of {source.config.hidden} numbers of the residual stream"
        return Plan(SLICEGPT, amount, form=sliced_config(source.config, width))
    if method == LLM_PRUNER:
        share = Sparsity(sparsity or 0).share
        return Plan(LLM_PRUNER, f"sparsity {share:g}", removable=tuple(removals(source.config, share)))
    chosen: Compressor
    if rank_share is not None:
        chosen, amount = LOW_RANK[method](rank_share), f"rank share {rank_share:g}"
    else:
        zeros = Sparsity.of(Pattern.parse(pattern)) if pattern is not None else Sparsity(sparsity or 0)
        chosen, amount = PRUNING[method](zeros), f"sparsity {zeros}"
        if bits is not None:
            chosen, amount = SparseGPT(zeros, bits), f"{amount}, {bits} bits in groups of {GROUP}"
    for role, shape in shapes_of(source.config).items():
        chosen.check(*shape, f"{role} in {source.name}")
    groups = None if pattern is None else Pattern.parse(pattern)
    two_of_four = groups is not None and groups.group == 4 and groups.kept <= 2
    ranks, allocation = ranks_of(source.config, chosen), allocation or ""
    amount += f", shared out by {allocation}" * bool(allocation)
    return Plan(method, amount, chosen, two_of_four=two_of_four, ranks=ranks, allocation=allocation)


def _check_allocation(method: str, allocation: str) -> None:
    """Refuse an allocation that is not the method's."""
    if allocation not in ALLOCATIONS:
        raise unknown("allocation", allocation, ALLOCATIONS)
    wanted = ALLOCATIONS[allocation]
    if method not in wanted:
        raise ValueError(f"--allocation {allocation} is for --method {', '.join(wanted)}, found {method}")


def _plan_reduction(rank_share: float | None) -> Plan:
    if rank_share is None:
        return Plan(LASER, "the best rank share", shares=SHARES)
    check_share(rank_share)
    return Plan(LASER, f"rank share {rank_share:g}", shares=(rank_share,))


def _plan_blocks(source: Source, share: float) -> Plan:
    layers = source.config.layers
    dropped = round(share * layers)
    if not 0 < dropped < layers:
        raise ValueError(
            f"--sparsity {share:g} leaves out {dropped} of {layers} blocks; leave out at least 1 and keep at least 1"
        )
    if source.config.window:
        raise ValueError(f"{source.name}: layers with a sliding window come in a fixed order, so none is left out")
    return Plan(SHORTGPT, f"{dropped} of {layers} blocks left out", dropped=dropped)


def compress_model(
    source: Source,
    chosen: Plan,
    job: Mapping[str, object],
    read_text: Callable[[], CalibrationText],
    out: Path,
    progress: Callable[[int], None] = lambda block: None,
) -> Card:
    """Compress, write, read what was written, compare it with the source, and only then put it in its place.

    `job`: everything that decides the result; an interrupted run of the same job is continued. `progress` is called
    with the number of blocks done.

    Raises:
        ValueError: the text is too short, or the model cannot be written.
    """
    work = UnfinishedResult(out, job)
    try:
        text = work.text(read_text)
        kept = list(range(source.config.layers))
        if chosen.shares:
            chosen, changed = _reduce(source, chosen, text, progress)
        elif chosen.method == LLM_PRUNER:
            chosen, changed = _narrow(source, chosen, text, progress)
        else:
            chosen = _share_out(source, chosen, text, work)
            kept = _run_blocks(source, chosen, text, work, progress)
            changed = unchanged if chosen.method == SHORTGPT else work.block
    except ValueError:
        work.remove()
        raise
    with whole(out) as part:
        write_checkpoint(source, output_config(source, chosen, kept), kept, changed, part)
        card = Card(
            method=chosen.method,
            amount=chosen.amount,
            source=source.name,
            blocks=tuple(kept),
            two_of_four=_runs_two_of_four(source, chosen),
            ranks={role: rank for role, rank in vars(chosen.ranks).items() if rank},
            zeros=share_of_zeros(part),
            calibration=text.origin if chosen.calibrated else "none",
            calibration_tokens=text.calibration.numel(),
            calibration_sha256=text_digest(text),
            comparison_text=text.origin,
            comparison=source.compare_with(part, text.held_back),
        )
        write_card(part, card)
    work.remove()
    return card


def _reduce(
    source: Source, chosen: Plan, text: CalibrationText, progress: Callable[[int], None]
) -> tuple[Plan, ChangedBlocks]:
    """Lower the rank of the best matrix; the plan that says which it is, and the tensors of its block."""
    reduction, block = best_reduction(source, text.calibration, chosen.shares, progress)
    tensors = tensors_of(source.config, reduction.block, block)
    return replace(chosen, amount=reduction.amount), {reduction.block: tensors}.get


def _narrow(
    source: Source, chosen: Plan, text: CalibrationText, progress: Callable[[int], None]
) -> tuple[Plan, ChangedBlocks]:
    """Choose the heads and channels that stay; the plan that says how many, and the tensors of the narrower blocks."""
    c = source.config
    groups = choose(importance(source, text.calibration, progress), chosen.removable)
    form = narrow_config(c, groups)

    def changed(i: int) -> Mapping[str, Tensor]:
        block = build_block(c, i, source.weights, torch.float32, _CPU)
        narrow_block(c, i, block, groups)
        return tensors_of(form, i, block)

    amount = f"{form.kv_heads} of {c.kv_heads} key-value heads and {form.ffn} of {c.ffn} channels in every block"
    return replace(chosen, amount=amount, form=form), changed


def _share_out(source: Source, chosen: Plan, text: CalibrationText, work: UnfinishedResult) -> Plan:
    """The plan with what every block gives up, where they give up unequal amounts."""
    compressor, shapes = chosen.compressor, shapes_of(source.config)
    if chosen.allocation == OWL:
        assert isinstance(compressor, Magnitude)
        outliers = work.kept("outliers", lambda: measure_blocks(source, text, outlier_share))
        shares = map(Sparsity, shares_by_outliers(outliers, compressor.sparsity.share))
        pruned = tuple(dict.fromkeys(shapes, replace(compressor, sparsity=share)) for share in shares)
        return replace(chosen, by_block=pruned)
    return chosen


def _run_blocks(
    source: Source, chosen: Plan, text: CalibrationText, work: UnfinishedResult, progress: Callable[[int], None]
) -> list[int]:
    """Compress the blocks, or measure them; returns the indices of those that stay."""
    c, weights, dtype, ropes = source.config, source.weights, dtype_of(source), decoder_rope_tables(source.config)
    done, x = work.resume()
    if x is None:
        x = embedded(c, weights, text.calibration)
    for i in range(done, c.layers):
        block = build_block(c, i, weights, torch.float32, _CPU)
        if chosen.form is not None:
            tensors, after = slice_tensors(c, ropes, i, block, x, chosen.form.hidden)
        elif chosen.compressor is None:
            after = run_block(c, ropes, i, block, x)
            tensors = {"influence": 1 - torch.cosine_similarity(x.double(), after.double(), -1).mean()}
        else:
            inputs = collect(c, ropes, i, block, x) if chosen.compressor.calibrated else {}
            with torch.inference_mode():
                for role, linear in linears(block).items():
                    compressor = chosen.by_block[i][role] if chosen.by_block else chosen.compressor
                    set_matrix(block, role, compressor.replace(linear, inputs.get(role), dtype))
            after = run_block(c, ropes, i, block, x) if chosen.compressor.calibrated else x
            tensors = tensors_of(c, i, block)
        x = after
        work.add(i, tensors, x)
        weights.release_pages()
        progress(i + 1)
    if chosen.method != SHORTGPT:
        return list(range(c.layers))
    influence = [float(work.block(i)["influence"]) for i in range(c.layers)]
    least = sorted(range(c.layers), key=lambda i: (influence[i], -i))[: chosen.dropped]
    return [i for i in range(c.layers) if i not in least]


def output_config(source: Source, chosen: Plan, kept: Sequence[int]) -> ModelConfig:
    """The configuration of the compressed model, which has these blocks."""
    return replace((chosen.form or source.config).of_layers(kept), low_rank=chosen.ranks)


def _runs_two_of_four(source: Source, chosen: Plan) -> bool:
    """Whether the CPU kernels pack the matrices by the pattern."""
    blocks = all(inputs % TWO_OF_FOUR_INPUTS == 0 for _, inputs in shapes_of(source.config).values())
    return chosen.two_of_four and blocks and dtype_of(source) == torch.bfloat16
