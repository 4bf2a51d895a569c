"""A model over several processes, each with a part of its weights: of every layer (tensor parallelism, arXiv
1909.08053), or some of the layers (pipeline parallelism). `torchrun` starts the processes, and transformers splits.

The first process decodes. Engine, drafters and acceptors are in it alone, and the others repeat the calls of its
runners: nothing that processes measure or choose can part them.
"""

import atexit
import logging
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from threading import RLock, current_thread, main_thread
from typing import Any, NoReturn
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist

from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.block.backend import Backend
from foretell.model.load.transformers import HFRunner, import_transformers, load_hf, model_class, model_config_of
from foretell.model.run.runner import Layers, Marks, Rows, Runner

log = logging.getLogger(__name__)
_ATTENTION = re.compile(r"attn|attention")
"""In names of a plan's layers."""
_IDLE = timedelta(days=365)
"""Longest time between two passes."""


@dataclass(frozen=True)
class Split:
    """The parts of a model, a process each: `tensor` of every layer, or `pipeline` of the list of layers."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.tensor * self.pipeline

    @property
    def leads(self) -> bool:
        """Whether this process is the first of them."""
        return self.processes == 1 or os.environ.get("RANK", "0") == "0"


WHOLE = Split()
"""One process has all weights."""


def load_split(path: Path, dtype: torch.dtype, device: torch.device, split: Split) -> tuple[Any, Callable[[], Runner]]:
    """Load the part of this process, as `load_hf` does; the model, and what makes its runners. The call returns in the
    first process only: in the others it ends when the first one ends, by `SystemExit`.

    Raises:
        ValueError: as `load_hf`; `torchrun` started another number of processes, or none; the process has loaded such a
            model before; or transformers has no plan for this architecture.
    """
    if min(split.tensor, split.pipeline) < 1:
        raise ValueError(
            f"a model has 1 part or more, found {split.tensor} of every layer and {split.pipeline} of layers"
        )
    if min(split.tensor, split.pipeline) > 1:  # its plan names the layers that the pipeline gave to other processes
        raise ValueError(
            f"transformers splits either every layer or the list of layers, found {split.tensor} parts of the one and "
            f"{split.pipeline} of the other; name one of tensor_parallel and pipeline_parallel"
        )
    _meet(device, split)
    try:
        model = load_hf(path, dtype, device, distributed_config=_plan(path, split))
        group = dist.new_group(backend="gloo", timeout=_IDLE)
        if dist.get_rank():
            _follow(model, group)
    except BaseException:
        dist.destroy_process_group()
        raise
    lead = _Lead(group)
    atexit.register(lead.end)
    return model, partial(SplitRunner, model, split, lead)


def _meet(device: torch.device, split: Split) -> None:
    """Connect the processes."""
    n, started = split.processes, int(os.environ.get("WORLD_SIZE", 1))
    if started != n:
        raise ValueError(
            f"a model in {n} parts needs {n} processes with the same command, found {started}; start them by "
            f"torchrun --nproc-per-node {n} -m foretell …, or torchrun --nproc-per-node {n} SCRIPT"
        )
    if dist.is_initialized():
        raise ValueError("torch.distributed is in use in this process already: it can load one model in parts")
    accelerator = torch.accelerator.current_accelerator()
    if device.type != (accelerator.type if accelerator else "cpu"):
        raise ValueError(
            f"transformers splits a model over the devices of the kind that torch prefers here, {accelerator}, and "
            f"{device.type} was asked for; hide GPUs by CUDA_VISIBLE_DEVICES= for a model on the CPU"
        )
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")


def _plan(path: Path, split: Split) -> Any:
    """What transformers is told. Attention stays whole in every process where its heads cannot be shared out evenly."""
    try:
        from transformers.distributed import DistributedConfig

        parts = partial(DistributedConfig, tp_size=split.tensor, pp_size=split.pipeline)
        plan = parts()
    except (ImportError, TypeError):
        version = import_transformers().__version__
        raise ValueError(
            f"transformers {version} cannot split models as this needs: pip install -U transformers"
        ) from None
    if split.tensor == 1:
        return plan
    with torch.device("meta"):
        kind, config = model_class(path)
        model = kind.from_config(config)
    sizes = model_config_of(model)
    if sizes.heads % split.tensor == 0 == sizes.kv_heads % split.tensor:
        return plan
    if not dist.get_rank():
        log.warning(
            "%s: %d heads of queries and %d of keys do not divide by %d: attention is whole in every process",
            path, sizes.heads, sizes.kv_heads, split.tensor,
        )  # fmt: skip
    return parts(tp_plan={name: "replicate" for name in model.tp_plan if _ATTENTION.search(name)})


_Call = tuple[int, str, tuple[Any, ...], dict[str, Any]]
"""Number of a runner, the name of its method, the arguments."""
_FORGET = "forget"
"""In the place of a method: the runner is gone."""


class _Lead:
    """The first process: it sends the calls of its runners to the others, all with the next pass."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.lock = RLock()
        self._group, self._connected, self._calls, self._numbers = group, True, list[_Call](), count()

    def number(self) -> int:
        """That of a new runner."""
        return next(self._numbers)

    def note(self, number: int, name: str, *arguments: Any, **options: Any) -> None:
        """A call that the others repeat before the next pass, or in it."""
        self._calls.append((number, name, arguments, options))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A pass of all processes, the last call that was noted. One that fails parts them.

        Raises:
            ValueError: one failed before.
        """
        if not self._connected:
            raise ValueError("an earlier pass failed in one of the model's processes: start all of them again")
        calls, self._calls = self._calls, []
        try:
            self._send(calls)
            yield
        except BaseException:
            self._part()
            raise

    def end(self) -> None:
        """Let the others end."""
        with self.lock, suppress(RuntimeError):
            if self._connected:
                try:
                    self._send(None)
                finally:
                    self._part()

    def _send(self, calls: list[_Call] | None) -> None:
        dist.broadcast_object_list([calls], src=0, group=self._group)

    def _part(self) -> None:
        self._connected = False
        dist.destroy_process_group()


@torch.inference_mode()
def _follow(model: Any, group: dist.ProcessGroup) -> NoReturn:
    """Repeat the calls of the first process until it ends, and exit."""
    if current_thread() is main_thread():
        # A server that is told to end decodes its last answers first.
        for told in (signal.SIGINT, signal.SIGTERM):
            signal.signal(told, signal.SIG_IGN)
    runners, received = defaultdict[int, HFRunner](partial(HFRunner, model)), list[Any]([None])
    while True:
        try:
            dist.broadcast_object_list(received, src=0, group=group)
            if received[0] is None:
                sys.exit()
            for number, name, arguments, options in received[0]:
                if name == _FORGET:
                    runners.pop(number, None)
                else:
                    getattr(runners[number], name)(*arguments, **options)
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]
            sys.exit(f"foretell: process {dist.get_rank()} of a model in parts ends: {reason}")


class SplitRunner(HFRunner):
    """The runner of the first process."""

    def __init__(self, model: Any, split: Split, lead: _Lead) -> None:
        super().__init__(model)
        self._split, self._lead, self._number = split, lead, lead.number()
        finalize(self, lead.note, self._number, _FORGET)

    @property
    def backend(self) -> Backend:
        """That of each process, and how many there are."""
        return replace(super().backend, name=f"transformers in {self._split.processes} processes")

    def check(self, tree: TokenTree, hidden_layers: Layers) -> None:
        """Check that transformers can run and return this.

        Raises:
            ValueError: it cannot.
        """
        super().check(tree, hidden_layers)
        if hidden_layers and self._split.pipeline > 1:
            raise ValueError(
                "this method reads hidden states, and transformers returns none of a model whose layers lie in several "
                "processes: use --tensor-parallel, or another method"
            )

    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Run nodes of a tree in all processes; see `Runner.forward`."""
        self.check(tree, hidden_layers)
        active = tree.active if active is None else active
        sent = replace(tree, q=None, score=None)
        with self._lead.lock:
            self._lead.note(self._number, "forward", list(rows), sent, active=active, scored=np.zeros_like(active))
            with self._lead.passing():
                return super().forward(rows, tree, active=active, scored=scored, hidden_layers=hidden_layers)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree as the row's next tokens."""
        self._lead.note(self._number, "commit", row, list(path))
        super().commit(row, path)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        self._lead.note(self._number, "truncate", row, length)
        super().truncate(row, length)
