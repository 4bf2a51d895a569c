"""The one loop that trains every speculator."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from foretell.train.data.batch import Batch
from foretell.train.data.features import FeatureSource, DocumentChunk, pad_sequences, padded_width
from foretell.train.loop import curve
from foretell.train.loop.ema import ExponentialMovingAverage
from foretell.train.loop.checkpoint import TrainState, CheckpointStore, TensorDict, check_resumable
from foretell.train.loop.curve import StepMetrics
from foretell.train.loop.measure import Measurement, measure
from foretell.train.loop.settings import TrainingSettings
from foretell.train.loop.distributed import local_shard, create_strategy
from foretell.train.loop.job import TrainingJob, dtype_of
from foretell.train.recipe.base import Loss

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW remembers of every parameter that ever had a gradient."""
_MIN_LR_FACTOR = 0.1
"""Of the learning rate, at the end of a cosine."""


class TrainingCallback:
    """Is told how a training goes; does nothing with it."""

    def on_train_begin(self, step: int, steps: int, processes: int) -> None:
        """Training starts, or goes on, after `step` of `steps` steps."""

    def on_step_end(self, row: StepMetrics) -> None:
        """A step is done."""

    def on_measure(self, measurement: Measurement, best: float) -> None:
        """Tokens per pass were measured; `best` is the most so far."""

    def on_save(self, step: int) -> None:
        """A checkpoint was written."""


class Trainer:
    """A training: the task, and where it stands.

    Everything about a step follows from settings and its number, so that it can be resumed.

    `accelerator` carries it over the processes it runs in; each sees its part of every batch, weighted by the tokens to
    be learned in it.
    """

    def __init__(self, task: TrainingJob, accelerator: "Accelerator", features: FeatureSource, watcher: TrainingCallback) -> None:
        self.job, self._accelerator, self._features, self._callback = task, accelerator, features, watcher
        self._strategy = create_strategy(accelerator, task.recipe.module, partial(_optimizer, task))
        self._module, self._optimizer = self._strategy.module, self._strategy.optimizer
        task.measured_recipe.module.to(accelerator.device).eval()
        decay = task.settings.ema
        self._ema = ExponentialMovingAverage(self._module, decay) if decay else None
        self._sharded = self._strategy.sharded
        self.out = Path(task.settings.out)
        self._store = CheckpointStore(self.out, accelerator.process_index if self._sharded else 0)
        self.step, self.stopped = 0, False
        self.curve: list[StepMetrics] = []
        self.best, self.best_step, self._stale = 0.0, 0, 0
        self.last_measurement: Measurement | None = None
        self._seconds = 0.0

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the end, from the checkpoint if there is one.

        Raises:
            ValueError: the checkpoint is of another training or damaged, the loss is no number, or no space is left for
                a checkpoint. KeyboardInterrupt: it was asked to stop, and has written a checkpoint.
        """
        self._resume()
        self._callback.on_train_begin(self.step, self.job.num_steps, self._accelerator.num_processes)
        started, saved = time.monotonic() - self._seconds, time.monotonic()
        while self.step < self.job.num_steps and not self.stopped:
            self._run_step(started)
            interrupted = should_stop()
            over = self.step == self.job.num_steps or self.stopped
            late = time.monotonic() - saved > 60 * self.job.settings.save_minutes
            if self._any_process(interrupted or late) or over:
                self._seconds = time.monotonic() - started
                self.save()
                saved = time.monotonic()
            if interrupted and not over:
                raise KeyboardInterrupt

    def _run_step(self, started: float) -> None:
        loss, rate = self._train_step(self.step)
        self.step += 1
        tokens = (self.curve[-1].tokens if self.curve else 0) + self._num_tokens(self.step - 1)
        found = self._measure() if self._should_measure() else None
        row = StepMetrics(
            step=self.step,
            tokens=tokens,
            loss=float(loss.total),
            lr=rate,
            seconds=time.monotonic() - started,
            metrics=loss.metrics,
            tokens_per_pass=found,
        )
        self.curve.append(row)
        self._callback.on_step_end(row)

    def _train_step(self, step: int) -> tuple[Loss, float]:
        """One step of the optimizer; its loss and learning rate."""
        s, on = self.job.settings, self._accelerator
        torch.manual_seed((s.seed * 1_000_003 + step) * on.num_processes + on.process_index)
        self.job.recipe.set_progress(step / self.job.num_steps)
        self._module.train()
        rate = s.lr * _lr_factor(s, step, self.job.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        batches = self.job.schedule.batches(step)
        learned = self.job.schedule.chunks.num_learned_tokens
        whole = sum(int(learned[rows].sum()) for rows in batches)
        sums = dict[str, float]()
        for i, rows in enumerate(batches):
            mine = rows[on.process_index :: on.num_processes]
            share = float(learned[mine].sum()) / whole
            # A batch of fewer texts than processes: whoever has none repeats one without weight, because all take part
            # in every exchange.
            batch = self._make_batch(mine if len(mine) else rows[:1])
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
        return Loss(total, sums), rate

    def _backward(self, batch: Batch, share: float) -> Loss:
        # Autocast here and not in the wrapper, which would turn all outputs into float32 copies.
        dtype = dtype_of(self.job.settings)
        with torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = self.job.recipe.loss(self._module, batch)
        # Gradients are averaged over the processes; shares add up to one.
        self._accelerator.backward(loss.total * (share * self._accelerator.num_processes))
        return loss

    def _make_batch(self, rows: Any) -> Batch:
        table, device = self.job.schedule.chunks, self._accelerator.device
        chosen, starts = [], []
        for r in rows.tolist():
            text = self.job.data[table.dataset[r]][int(table.document[r])]
            begin, end = int(table.begin[r]), int(table.end[r])
            chosen.append(DocumentChunk(int(table.dataset[r]), int(table.document[r]), text.tokens, begin, end))
            starts.append(max(text.start - begin, 0))
        wide = padded_width(max(p.end - p.begin for p in chosen))
        token = pad_sequences([p.text[p.begin : p.end] for p in chosen], wide)
        place = torch.arange(wide)
        real = place < torch.tensor([p.end - p.begin for p in chosen])[:, None]
        answer = real & (place >= torch.tensor(starts)[:, None])
        features = self._features.get(chosen, wide)
        return Batch(token.to(device), answer.to(device), real.to(device), tuple(f.to(device) for f in features))

    def _num_tokens(self, step: int) -> int:
        length = self.job.schedule.chunks.length
        return sum(int(length[rows].sum()) for rows in self.job.schedule.batches(step))

    def _all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over the processes."""
        if self._accelerator.num_processes == 1:
            return values
        names = list(values)
        found = torch.tensor([values[n] for n in names], dtype=torch.float64, device=self._accelerator.device)
        return dict(zip(names, self._accelerator.reduce(found, "sum").tolist(), strict=True))

    def _any_process(self, wish: bool) -> bool:
        """Whether any process wishes it."""
        return self._all_reduce({"": float(wish)})[""] > 0

    def _non_finite_message(self, step: int, loss: float) -> str:
        table, places = self.job.schedule.chunks, list[str]()
        rows = [r for batch in self.job.schedule.batches(step) for r in batch.tolist()]
        for source in sorted({int(table.dataset[r]) for r in rows}):
            texts = sorted({int(table.document[r]) for r in rows if table.dataset[r] == source})
            more = f" and {len(texts) - 12} more" if len(texts) > 12 else ""
            places.append(f"texts {', '.join(map(str, texts[:12]))}{more} of {self.job.data[source].folder}")
        good = self._store.latest()
        kept = "there is no checkpoint yet" if good is None else f"the checkpoint of step {int(good.name[5:])} stays"
        what = "gradient is not finite" if math.isfinite(loss) else f"loss is {loss}"
        return f"the {what} at step {step + 1} ({'; '.join(places)}): {kept}; try a lower --lr, a longer --warmup or --precision no"

    def _should_measure(self) -> bool:
        every = self.job.settings.measure_every
        return self.step == self.job.num_steps or (every > 0 and self.step % every == 0)

    def _measure(self) -> float:
        """Tokens per pass of the weights as they are now (their average, where there is one); the best ones become the
        result.
        """
        task = self.job
        with self._ema_weights():
            state = self._strategy.full_state_dict()
        value = 0.0
        if self._accelerator.is_main_process:
            task.measured_recipe.module.load_state_dict(state)
            method = task.measured_recipe.method(task.measured_recipe.network)
            with torch.inference_mode():
                found = measure(
                    task.measured_recipe.target_runner() or task.model.runner(),
                    method,
                    task.prompts,
                    task.settings.measure_tokens,
                    task.model.eos,
                )
            self.last_measurement, value = found, found.tokens_per_pass
            if value > self.best:
                task.measured_recipe.save(self.out)
        value = self._all_reduce({"": value})[""]
        if value > self.best:
            self.best, self.best_step, self._stale = value, self.step, 0
        else:
            self._stale += 1
        patience = task.settings.patience
        self.stopped = 0 < patience <= self._stale
        if self.last_measurement is not None:
            self._callback.on_measure(self.last_measurement, self.best)
        return value

    @contextmanager
    def _ema_weights(self) -> Iterator[None]:
        if self._ema:
            self._ema.swap()
        yield
        if self._ema:
            self._ema.swap()

    def save(self) -> None:
        """Write a checkpoint and the curve."""
        main, on = self._accelerator.is_main_process, self._accelerator
        if main or self._sharded:
            self._store.write_tensors(self.step, self._tensors())
        on.wait_for_everyone()
        if main:
            self._store.commit(self._train_state())
            curve.write_curve(self.out, self.curve, picture=False)
        on.wait_for_everyone()
        self._callback.on_save(self.step)

    def _train_state(self) -> TrainState:
        return TrainState(
            settings=self.job.settings,
            target=self.job.fingerprint,
            documents=self.job.num_documents,
            processes=self._accelerator.num_processes if self._sharded else 1,
            step=self.step,
            seconds=self._seconds,
            best=self.best,
            best_step=self.best_step,
            stale=self._stale,
            stopped=self.stopped,
            curve=tuple(self.curve),
        )

    def _resume(self) -> None:
        stand = self._store.load_state()
        if stand is None:
            return
        processes = self._accelerator.num_processes if self._sharded else 1
        check_resumable(stand, self.job.settings, self.job.fingerprint, self.job.num_documents, processes)
        self._load(self._store.load_tensors())
        self.step, self.stopped, self._seconds = stand.step, stand.stopped, stand.seconds
        self.best, self.best_step, self._stale = stand.best, stand.best_step, stand.stale
        self.curve = list(stand.curve)

    def _tensors(self) -> TensorDict:
        out = {f"recipe/{name}": value for name, value in self.job.recipe.state().items()}
        for name, parameter in self._parameters().items():
            for part, value in self._optimizer_state(parameter).items():
                out[f"optimizer/{part}/{name}"] = local_shard(value)
        return out | self._module_tensors()

    @torch.no_grad()
    def _load(self, tensors: TensorDict) -> None:
        for key, held in self._module_tensors().items():
            held.copy_(self._require_tensor(tensors, key, held.shape))
        for name, parameter in self._parameters().items():
            state = self._optimizer_state(parameter)
            keys = {part: f"optimizer/{part}/{name}" for part in _ADAM_STATE}
            for part, key in keys.items() if any(key in tensors for key in keys.values()) else ():
                state[part] = (
                    torch.zeros((), device=parameter.device) if part == "step" else torch.zeros_like(parameter)
                )
                local_shard(state[part]).copy_(self._require_tensor(tensors, key, local_shard(state[part]).shape))
        try:
            self.job.recipe.load_state({k[7:]: v for k, v in tensors.items() if k.startswith("recipe/")})
        except (KeyError, ValueError, RuntimeError) as error:
            raise self._store.missing_tensor_error(f"recipe/{error}") from error

    def _module_tensors(self) -> TensorDict:
        """What a checkpoint keeps of the module, as it lies in memory: weights, buffers that are saved with them, and
        the moving average.
        """
        kept = self.job.measured_recipe.module.state_dict()
        out: TensorDict = {"weight/" + n: local_shard(p.detach()) for n, p in self._parameters().items()}
        out |= {"buffer/" + n: b for n, b in _strip_ddp_prefix(self._module.named_buffers()).items() if n in kept}
        if self._ema:
            out |= {"average/" + n: local_shard(v) for n, v in _strip_ddp_prefix(self._ema.values.items()).items()}
        return out

    def _require_tensor(self, tensors: TensorDict, key: str, shape: torch.Size) -> torch.Tensor:
        found: torch.Tensor | None = tensors.get(key)
        if found is None or found.shape != shape:
            raise self._store.missing_tensor_error(key)
        return found

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in _strip_ddp_prefix(self._module.named_parameters()).items() if p.requires_grad}

    def _optimizer_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._optimizer.optimizer.state[parameter]
        return state


def _strip_ddp_prefix(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Without the wrapper of copies that exchange gradients, so that one process reads what several wrote."""
    return {name.removeprefix("module."): value for name, value in named}


def _optimizer(task: TrainingJob) -> torch.optim.Optimizer:
    groups = [dict(g) for g in task.recipe.parameter_groups()]
    return torch.optim.AdamW(groups, lr=task.settings.lr, weight_decay=task.settings.weight_decay, fused=True)


def _lr_factor(settings: TrainingSettings, step: int, steps: int) -> float:
    """Share of the learning rate that a step takes: a linear warm-up, then half a cosine down to a tenth (or no
    change).
    """
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    if settings.schedule == "constant":
        return warm
    done = max(step - settings.warmup, 0) / max(steps - settings.warmup, 1)
    return warm * (_MIN_LR_FACTOR + (1 - _MIN_LR_FACTOR) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
