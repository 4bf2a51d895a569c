"""The training loop of all recipes."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import nn

from foretell.train.data.batch import Batch
from foretell.train.data.features import DocumentChunk, FeatureSource, pad_sequences, padded_width
from foretell.train.loop.checkpoint import (
    CheckpointStore,
    TrainState,
    begin_optimizer,
    check_resumable,
    optimizer_tensors,
    step_of,
)
from foretell.train.loop.curve import StepMetrics, write_curve
from foretell.train.loop.distributed import create_strategy, local_shard
from foretell.train.loop.ema import ExponentialMovingAverage
from foretell.train.loop.job import TrainingJob, dtype_of
from foretell.train.loop.measure import Measurement, measure
from foretell.train.loop.output_scale import output_scale
from foretell.train.loop.progress import Progress
from foretell.train.recipe.base import Loss, TensorDict

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

_SEED_FACTOR = 1_000_003
"""Distance between the seeds of two trainings: more than a training has steps."""
_SHOWN_DOCUMENTS = 12
"""Document numbers in an error message."""


class TrainingCallback:
    """Observer of a training; this base class ignores all events."""

    def on_train_begin(self, step: int, steps: int, processes: int) -> None:
        """Training starts, or resumes, after `step` of `steps` steps."""

    def on_step_end(self, metrics: StepMetrics, share: float) -> None:
        """A step is finished, and with it this share of the training."""

    def on_measure(self, measurement: Measurement, best: float) -> None:
        """Tokens per pass were measured; `best` is the highest value so far."""

    def on_save(self, step: int) -> None:
        """A checkpoint was written."""


class Trainer:
    """Runs a training job from its latest checkpoint to its end.

    A step depends only on the settings, its number and the tensors, so a resumed training repeats an uninterrupted one.
    Each process of `accelerator` sees a part of every batch, weighted by its tokens to learn.
    """

    def __init__(
        self, job: TrainingJob, accelerator: "Accelerator", features: FeatureSource, callback: TrainingCallback
    ) -> None:
        self.job, self._accelerator, self._features, self._callback = job, accelerator, features, callback
        self.out = Path(job.settings.out)
        if job.init_folder is None and CheckpointStore(self.out, TrainState).latest() is None:
            self._scale_output()
        self._strategy = create_strategy(accelerator, job.recipe.module, partial(_optimizer, job))
        self._module, self._optimizer = self._strategy.module, self._strategy.optimizer
        job.measured_recipe.module.to(accelerator.device).eval()
        decay = job.settings.ema
        self._ema = ExponentialMovingAverage(self._module, decay) if decay else None
        self._sharded = self._strategy.sharded
        self._store = CheckpointStore(self.out, TrainState, accelerator.process_index if self._sharded else 0)
        self.progress, self.stopped = Progress(job.settings, job.num_steps), False
        self.curve: list[StepMetrics] = []
        self.best, self.best_step, self._stale = 0.0, 0, 0
        self.last_measurement: Measurement | None = None
        self._seconds = 0.0

    def _scale_output(self) -> None:
        """Scale the output norm of a new network to the first batch, before the processes share its weights."""
        recipe, scale = self.job.recipe, 1.0
        norm = recipe.output_norm
        if norm is None:
            return
        recipe.module.to(self._accelerator.device)
        if self._accelerator.is_main_process:
            batch, seed = self._make_batch(self.job.schedule.batches(0)[0]), self.job.settings.seed
            scale = output_scale(norm, lambda: float(self._loss(recipe.module, batch).total), seed)
        with torch.no_grad():
            norm.mul_(self._all_reduce({"": scale if self._accelerator.is_main_process else 0.0})[""])

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.progress.step

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the end, from the latest checkpoint if there is one.

        Raises:
            ValueError: the checkpoint is damaged or of another training, the loss is not finite, or the disk is full.
            KeyboardInterrupt: `should_stop` returned True; a checkpoint was written.
        """
        self._resume()
        self._callback.on_train_begin(self.step, self.job.num_steps, self._accelerator.num_processes)
        started, saved = time.monotonic() - self._seconds, time.monotonic()
        while not (self.progress.finished or self.stopped):
            self._run_step(started)
            interrupted = should_stop()
            finished = self.progress.finished or self.stopped
            due = time.monotonic() - saved > 60 * self.job.settings.save_minutes
            if self._any_process(interrupted or due) or finished:
                self._seconds = time.monotonic() - started
                self.save()
                saved = time.monotonic()
            if interrupted and not finished:
                raise KeyboardInterrupt

    def _run_step(self, started: float) -> None:
        begin = time.process_time()
        loss, lr = self._train_step(self.step)
        # All processes must agree on the end.
        spent = self._all_reduce({"processor": time.process_time() - begin, "clock": time.monotonic() - started})
        self.progress.add_step(spent["processor"], spent["clock"] / self._accelerator.num_processes)
        tokens = (self.curve[-1].tokens if self.curve else 0) + self._num_tokens(self.step - 1)
        metrics = StepMetrics(
            step=self.step,
            tokens=tokens,
            loss=float(loss.total),
            lr=lr,
            tokens_per_pass=self._measure() if self._should_measure() else None,
            seconds=time.monotonic() - started,
            metrics=loss.metrics,
        )
        self.curve.append(metrics)
        self._callback.on_step_end(metrics, self.progress.share)

    def _train_step(self, step: int) -> tuple[Loss, float]:
        """One optimizer step; returns its loss and learning rate."""
        s, index, processes = self.job.settings, self._accelerator.process_index, self._accelerator.num_processes
        torch.manual_seed((s.seed * _SEED_FACTOR + step) * processes + index)
        self.job.recipe.set_progress(self.progress.share)
        self._module.train()
        lr = s.lr * self.progress.lr_factor
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        batches = self.job.schedule.batches(step)
        num_learned = self.job.schedule.chunks.num_learned_tokens
        total_learned = sum(int(num_learned[rows].sum()) for rows in batches)
        sums = dict[str, float]()
        for i, rows in enumerate(batches):
            local_rows = rows[index::processes]
            share = float(num_learned[local_rows].sum()) / total_learned
            # In a batch with fewer chunks than processes, a process without a chunk takes the first one with weight 0,
            # because all processes take part in every exchange of gradients.
            batch = self._make_batch(local_rows if len(local_rows) else rows[:1])
            with nullcontext() if i == len(batches) - 1 else self._strategy.no_sync():
                loss = self._backward(batch, share)
            for name, value in {"": float(loss.total.detach()), **loss.metrics}.items():
                sums[name] = sums.get(name, 0.0) + share * value
        sums = self._all_reduce(sums)
        norm = self._strategy.clip_grad_norm(s.clip)
        if not (math.isfinite(sums[""]) and math.isfinite(norm)):
            raise ValueError(self._non_finite_message(step, sums[""]))
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._ema:
            self._ema.update(step + 1)
        total = torch.tensor(sums.pop(""))
        return Loss(total, sums), lr

    def _loss(self, module: nn.Module, batch: Batch) -> Loss:
        # Autocast here and not in accelerate's wrapper, which would copy all outputs to float32.
        dtype = dtype_of(self.job.settings)
        with torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            return self.job.recipe.loss(module, batch)

    def _backward(self, batch: Batch, share: float) -> Loss:
        loss = self._loss(self._module, batch)
        # Gradients are averaged over the processes; shares add up to one.
        self._accelerator.backward(loss.total * (share * self._accelerator.num_processes))
        return loss

    def _make_batch(self, rows: Int[np.ndarray, " b"]) -> Batch:
        table, device = self.job.schedule.chunks, self._accelerator.device
        chunks, starts = list[DocumentChunk](), list[int]()
        for r in rows.tolist():
            dataset, index = int(table.dataset[r]), int(table.document[r])
            document = self.job.data[dataset][index]
            begin, end = int(table.begin[r]), int(table.end[r])
            chunks.append(DocumentChunk(dataset, index, document.tokens, begin, end))
            starts.append(max(document.start - begin, 0))
        lengths = [len(c) for c in chunks]
        width = padded_width(max(lengths))
        token = pad_sequences([c.tokens[c.begin : c.end] for c in chunks], width)
        position = torch.arange(width)
        loss_mask = (position < torch.tensor(lengths)[:, None]) & (position >= torch.tensor(starts)[:, None])
        features = self._features.get(chunks, width)
        return Batch(token.to(device), loss_mask.to(device), tuple(f.to(device) for f in features))

    def _num_tokens(self, step: int) -> int:
        length = self.job.schedule.chunks.length
        return sum(int(length[rows].sum()) for rows in self.job.schedule.batches(step))

    def _all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over the processes."""
        if self._accelerator.num_processes == 1:
            return values
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self._accelerator.device)
        return dict(zip(values, self._accelerator.reduce(tensor, "sum").tolist(), strict=True))

    def _any_process(self, value: bool) -> bool:
        """Whether the value is True in any process."""
        return self._all_reduce({"": float(value)})[""] > 0

    def _non_finite_message(self, step: int, loss: float) -> str:
        table, places = self.job.schedule.chunks, list[str]()
        rows = [r for batch in self.job.schedule.batches(step) for r in batch.tolist()]
        for dataset in sorted({int(table.dataset[r]) for r in rows}):
            documents = sorted({int(table.document[r]) for r in rows if table.dataset[r] == dataset})
            shown, hidden = documents[:_SHOWN_DOCUMENTS], len(documents[_SHOWN_DOCUMENTS:])
            more = f" and {hidden} more" if hidden else ""
            places.append(f"documents {', '.join(map(str, shown))}{more} of {self.job.data[dataset].folder}")
        latest = self._store.latest()
        kept = "there is no checkpoint yet" if latest is None else f"the checkpoint of step {step_of(latest)} stays"
        what = "gradient is not finite" if math.isfinite(loss) else f"loss is {loss}"
        remedy = "try a lower --lr, a longer --warmup or --precision no"
        return f"the {what} at step {step + 1} ({'; '.join(places)}): {kept}; {remedy}"

    def _should_measure(self) -> bool:
        every = self.job.settings.measure_every
        return self.progress.finished or (every > 0 and self.step % every == 0)

    def _measure(self) -> float:
        """Measure tokens per pass of the current weights (of their average if `ema` is set); save the best weights."""
        job, recipe = self.job, self.job.measured_recipe
        with self._ema_weights():
            state = self._strategy.full_state_dict()
        value = 0.0
        if self._accelerator.is_main_process:
            recipe.module.load_state_dict(state)
            method, runner = recipe.method(recipe.network), recipe.target_runner() or job.model.runner()
            with torch.inference_mode():
                measurement = measure(
                    runner,
                    method,
                    prompts=job.prompts,
                    new_tokens=job.settings.measure_tokens,
                    eos=job.model.eos,
                    measured_plan=recipe.measured_plan,
                )
            self.last_measurement, value = measurement, measurement.tokens_per_pass
            if value > self.best:
                recipe.save(self.out)
        value = self._all_reduce({"": value})[""]
        if value > self.best:
            self.best, self.best_step, self._stale = value, self.step, 0
        else:
            self._stale += 1
        self.stopped = 0 < job.settings.patience <= self._stale
        if self.last_measurement is not None:
            self._callback.on_measure(self.last_measurement, self.best)
        return value

    @contextmanager
    def _ema_weights(self) -> Iterator[None]:
        """With the moving average of the weights in the place of the weights, if there is one."""
        if not self._ema:
            yield
            return
        self._ema.swap()
        try:
            yield
        finally:
            self._ema.swap()

    def save(self) -> None:
        """Write a checkpoint and the curve."""
        main = self._accelerator.is_main_process
        if main or self._sharded:
            self._store.write_tensors(self.step, self._tensors())
        self._accelerator.wait_for_everyone()
        if main:
            self._store.commit(self._train_state())
            write_curve(self.out, self.curve, with_plot=False)
        self._accelerator.wait_for_everyone()
        self._callback.on_save(self.step)

    @property
    def _tensor_processes(self) -> int:
        """Processes that write tensors into a checkpoint."""
        return self._accelerator.num_processes if self._sharded else 1

    def _train_state(self) -> TrainState:
        return TrainState(
            settings=self.job.settings,
            target=self.job.fingerprint,
            documents=self.job.num_documents,
            processes=self._tensor_processes,
            step=self.step,
            seconds=self._seconds,
            cpu_seconds=self.progress.cpu_seconds,
            best=self.best,
            best_step=self.best_step,
            stale=self._stale,
            stopped=self.stopped,
            curve=tuple(self.curve),
        )

    def _resume(self) -> None:
        state = self._store.load_state()
        if state is None:
            return
        check_resumable(state, self.job.settings, self.job.fingerprint, self.job.num_documents, self._tensor_processes)
        self._load(self._store.load_tensors())
        self.progress.step, self.progress.cpu_seconds = state.step, state.cpu_seconds
        self.stopped, self._seconds = state.stopped, state.seconds
        self.progress.seconds = state.seconds
        self.best, self.best_step, self._stale = state.best, state.best_step, state.stale
        self.curve = list(state.curve)

    def _tensors(self) -> TensorDict:
        """This process's tensors in a checkpoint, not copied: the recipe's, the optimizer's, weights, persistent
        buffers and the moving average.
        """
        return {f"recipe/{name}": value for name, value in self.job.recipe.state().items()} | self._own_tensors()

    @torch.no_grad()
    def _load(self, tensors: TensorDict) -> None:
        begin_optimizer(self._parameters(), self._optimizer.optimizer, tensors)
        self._store.restore(tensors, self._own_tensors())
        try:
            self.job.recipe.load_state(
                {k.removeprefix("recipe/"): v for k, v in tensors.items() if k.startswith("recipe/")}
            )
        except (KeyError, ValueError, RuntimeError) as error:
            raise self._store.missing_tensor_error(f"recipe/{error}") from error

    def _own_tensors(self) -> TensorDict:
        """Those beside the recipe's."""
        parameters, persistent = self._parameters(), self.job.measured_recipe.module.state_dict()
        out = optimizer_tensors(parameters, self._optimizer.optimizer)
        out |= {"weight/" + n: p.detach() for n, p in parameters.items()}
        out |= {"buffer/" + n: b for n, b in _strip_ddp_prefix(self._module.named_buffers()).items() if n in persistent}
        if self._ema:
            out |= {"average/" + n: v for n, v in _strip_ddp_prefix(self._ema.values.items()).items()}
        return {name: local_shard(tensor) for name, tensor in out.items()}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in _strip_ddp_prefix(self._module.named_parameters()).items() if p.requires_grad}


def _strip_ddp_prefix(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Names without the prefix of DistributedDataParallel, so that one process reads what several wrote."""
    return {name.removeprefix("module."): value for name, value in named}


def _optimizer(job: TrainingJob) -> torch.optim.Optimizer:
    groups = [dict(g) for g in job.recipe.parameter_groups()]
    return torch.optim.AdamW(groups, lr=job.settings.lr, weight_decay=job.settings.weight_decay, fused=True)
