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
from foretell.train.data.features import Features, Piece, padded, width
from foretell.train.loop import curve
from foretell.train.loop.ema import Average
from foretell.train.loop.checkpoint import Stand, Store, Tensors, belongs
from foretell.train.loop.curve import Row
from foretell.train.loop.measure import Measured, measure
from foretell.train.loop.settings import Settings
from foretell.train.loop.distributed import local, spread
from foretell.train.loop.job import Task, dtype_of
from foretell.train.recipe.base import Loss

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

_ADAM = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW remembers of every parameter that ever had a gradient."""
_FLOOR = 0.1
"""Of the learning rate, at the end of a cosine."""


class Watcher:
    """Is told how a training goes; does nothing with it."""

    def begun(self, step: int, steps: int, processes: int) -> None:
        """Training starts, or goes on, after `step` of `steps` steps."""

    def stepped(self, row: Row) -> None:
        """A step is done."""

    def measured(self, found: Measured, best: float) -> None:
        """Tokens per pass were measured; `best` is the most so far."""

    def saved(self, step: int) -> None:
        """A checkpoint was written."""


class Trainer:
    """A training: the task, and where it stands.

    Everything about a step follows from settings and its number, so that it can be resumed.

    `accelerator` carries it over the processes it runs in; each sees its part of every batch, weighted by the tokens to
    be learned in it.
    """

    def __init__(self, task: Task, accelerator: "Accelerator", features: Features, watcher: Watcher) -> None:
        self.task, self._on, self._features, self._watcher = task, accelerator, features, watcher
        self._spread = spread(accelerator, task.recipe.trained, partial(_optimizer, task))
        self._module, self._optimizer = self._spread.module, self._spread.optimizer
        task.shadow.trained.to(accelerator.device).eval()
        decay = task.settings.ema
        self._average = Average(self._module, decay) if decay else None
        self._sharded = self._spread.sharded
        self.out = Path(task.settings.out)
        self._store = Store(self.out, accelerator.process_index if self._sharded else 0)
        self.step, self.stopped = 0, False
        self.rows: list[Row] = []
        self.best, self.best_step, self._stale = 0.0, 0, 0
        self.last: Measured | None = None
        self._seconds = 0.0

    def run(self, asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the end, from the checkpoint if there is one.

        Raises:
            ValueError: the checkpoint is of another training or damaged, the loss is no number, or no space is left for
                a checkpoint. KeyboardInterrupt: it was asked to stop, and has written a checkpoint.
        """
        self._resume()
        self._watcher.begun(self.step, self.task.steps, self._on.num_processes)
        started, saved = time.monotonic() - self._seconds, time.monotonic()
        while self.step < self.task.steps and not self.stopped:
            self._one(started)
            interrupted = asked_to_stop()
            over = self.step == self.task.steps or self.stopped
            late = time.monotonic() - saved > 60 * self.task.settings.save_minutes
            if self._agreed(interrupted or late) or over:
                self._seconds = time.monotonic() - started
                self.save()
                saved = time.monotonic()
            if interrupted and not over:
                raise KeyboardInterrupt

    def _one(self, started: float) -> None:
        loss, rate = self._learn(self.step)
        self.step += 1
        tokens = (self.rows[-1].tokens if self.rows else 0) + self._tokens(self.step - 1)
        found = self._measure() if self._due() else None
        row = Row(
            step=self.step,
            tokens=tokens,
            loss=float(loss.total),
            lr=rate,
            seconds=time.monotonic() - started,
            figures=loss.figures,
            tokens_per_pass=found,
        )
        self.rows.append(row)
        self._watcher.stepped(row)

    def _learn(self, step: int) -> tuple[Loss, float]:
        """One step of the optimizer; its loss and learning rate."""
        s, on = self.task.settings, self._on
        torch.manual_seed((s.seed * 1_000_003 + step) * on.num_processes + on.process_index)
        self.task.recipe.stage(step / self.task.steps)
        self._module.train()
        rate = s.lr * _factor(s, step, self.task.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        batches = self.task.schedule.at(step)
        learned = self.task.schedule.pieces.learned
        whole = sum(int(learned[rows].sum()) for rows in batches)
        sums = dict[str, float]()
        for i, rows in enumerate(batches):
            mine = rows[on.process_index :: on.num_processes]
            share = float(learned[mine].sum()) / whole
            # A batch of fewer texts than processes: whoever has none repeats one without weight, because all take part
            # in every exchange.
            batch = self._batch(mine if len(mine) else rows[:1])
            with nullcontext() if i == len(batches) - 1 else self._spread.apart():
                loss = self._backward(batch, share)
            for name, value in {"": float(loss.total.detach()), **loss.figures}.items():
                sums[name] = sums.get(name, 0.0) + share * value
        sums = self._summed(sums)
        norm = self._spread.clip(s.clip)
        if not (math.isfinite(sums[""]) and math.isfinite(norm)):
            raise ValueError(self._lost(step, sums[""]))
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._average:
            self._average.update(step + 1)
        total = torch.tensor(sums.pop(""))
        return Loss(total, sums), rate

    def _backward(self, batch: Batch, share: float) -> Loss:
        # Autocast here and not in the wrapper, which would turn all outputs into float32 copies.
        dtype = dtype_of(self.task.settings)
        with torch.autocast(self._on.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = self.task.recipe.loss(self._module, batch)
        # Gradients are averaged over the processes; shares add up to one.
        self._on.backward(loss.total * (share * self._on.num_processes))
        return loss

    def _batch(self, rows: Any) -> Batch:
        table, device = self.task.schedule.pieces, self._on.device
        chosen, starts = [], []
        for r in rows.tolist():
            text = self.task.data[table.source[r]][int(table.document[r])]
            begin, end = int(table.begin[r]), int(table.end[r])
            chosen.append(Piece(int(table.source[r]), int(table.document[r]), text.tokens, begin, end))
            starts.append(max(text.start - begin, 0))
        wide = width(max(p.end - p.begin for p in chosen))
        token = padded([p.text[p.begin : p.end] for p in chosen], wide)
        place = torch.arange(wide)
        real = place < torch.tensor([p.end - p.begin for p in chosen])[:, None]
        answer = real & (place >= torch.tensor(starts)[:, None])
        features = self._features.of(chosen, wide)
        return Batch(token.to(device), answer.to(device), real.to(device), tuple(f.to(device) for f in features))

    def _tokens(self, step: int) -> int:
        length = self.task.schedule.pieces.length
        return sum(int(length[rows].sum()) for rows in self.task.schedule.at(step))

    def _summed(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over the processes."""
        if self._on.num_processes == 1:
            return values
        names = list(values)
        found = torch.tensor([values[n] for n in names], dtype=torch.float64, device=self._on.device)
        return dict(zip(names, self._on.reduce(found, "sum").tolist(), strict=True))

    def _agreed(self, wish: bool) -> bool:
        """Whether any process wishes it."""
        return self._summed({"": float(wish)})[""] > 0

    def _lost(self, step: int, loss: float) -> str:
        table, places = self.task.schedule.pieces, list[str]()
        rows = [r for batch in self.task.schedule.at(step) for r in batch.tolist()]
        for source in sorted({int(table.source[r]) for r in rows}):
            texts = sorted({int(table.document[r]) for r in rows if table.source[r] == source})
            more = f" and {len(texts) - 12} more" if len(texts) > 12 else ""
            places.append(f"texts {', '.join(map(str, texts[:12]))}{more} of {self.task.data[source].folder}")
        good = self._store.newest()
        kept = "there is no checkpoint yet" if good is None else f"the checkpoint of step {int(good.name[5:])} stays"
        what = "gradient is not finite" if math.isfinite(loss) else f"loss is {loss}"
        return f"the {what} at step {step + 1} ({'; '.join(places)}): {kept}; try a lower --lr, a longer --warmup or --precision no"

    def _due(self) -> bool:
        every = self.task.settings.measure_every
        return self.step == self.task.steps or (every > 0 and self.step % every == 0)

    def _measure(self) -> float:
        """Tokens per pass of the weights as they are now (their average, where there is one); the best ones become the
        result.
        """
        task = self.task
        with self._averaged():
            state = self._spread.whole()
        value = 0.0
        if self._on.is_main_process:
            task.shadow.trained.load_state_dict(state)
            method = task.shadow.method(task.shadow.network)
            with torch.inference_mode():
                found = measure(
                    task.shadow.runner() or task.model.runner(),
                    method,
                    task.prompts,
                    task.settings.measure_tokens,
                    task.model.eos,
                )
            self.last, value = found, found.tokens_per_pass
            if value > self.best:
                task.shadow.save(self.out)
        value = self._summed({"": value})[""]
        if value > self.best:
            self.best, self.best_step, self._stale = value, self.step, 0
        else:
            self._stale += 1
        patience = task.settings.patience
        self.stopped = 0 < patience <= self._stale
        if self.last is not None:
            self._watcher.measured(self.last, self.best)
        return value

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        if self._average:
            self._average.swap()
        yield
        if self._average:
            self._average.swap()

    def save(self) -> None:
        """Write a checkpoint and the curve."""
        main, on = self._on.is_main_process, self._on
        if main or self._sharded:
            self._store.write(self.step, self._tensors())
        on.wait_for_everyone()
        if main:
            self._store.finish(self._stand())
            curve.write(self.out, self.rows, picture=False)
        on.wait_for_everyone()
        self._watcher.saved(self.step)

    def _stand(self) -> Stand:
        return Stand(
            settings=self.task.settings,
            target=self.task.fingerprint,
            documents=self.task.documents,
            processes=self._on.num_processes if self._sharded else 1,
            step=self.step,
            seconds=self._seconds,
            best=self.best,
            best_step=self.best_step,
            stale=self._stale,
            stopped=self.stopped,
            curve=tuple(self.rows),
        )

    def _resume(self) -> None:
        stand = self._store.stand()
        if stand is None:
            return
        processes = self._on.num_processes if self._sharded else 1
        belongs(stand, self.task.settings, self.task.fingerprint, self.task.documents, processes)
        self._load(self._store.tensors())
        self.step, self.stopped, self._seconds = stand.step, stand.stopped, stand.seconds
        self.best, self.best_step, self._stale = stand.best, stand.best_step, stand.stale
        self.rows = list(stand.curve)

    def _tensors(self) -> Tensors:
        out = {f"recipe/{name}": value for name, value in self.task.recipe.state().items()}
        for name, parameter in self._parameters().items():
            for part, value in self._state(parameter).items():
                out[f"optimizer/{part}/{name}"] = local(value)
        return out | self._held()

    @torch.no_grad()
    def _load(self, tensors: Tensors) -> None:
        for key, held in self._held().items():
            held.copy_(self._found(tensors, key, held.shape))
        for name, parameter in self._parameters().items():
            state = self._state(parameter)
            keys = {part: f"optimizer/{part}/{name}" for part in _ADAM}
            for part, key in keys.items() if any(key in tensors for key in keys.values()) else ():
                state[part] = (
                    torch.zeros((), device=parameter.device) if part == "step" else torch.zeros_like(parameter)
                )
                local(state[part]).copy_(self._found(tensors, key, local(state[part]).shape))
        try:
            self.task.recipe.load_state({k[7:]: v for k, v in tensors.items() if k.startswith("recipe/")})
        except (KeyError, ValueError, RuntimeError) as error:
            raise self._store.damaged(f"recipe/{error}") from error

    def _held(self) -> Tensors:
        """What a checkpoint keeps of the module, as it lies in memory: weights, buffers that are saved with them, and
        the moving average.
        """
        kept = self.task.shadow.trained.state_dict()
        out: Tensors = {"weight/" + n: local(p.detach()) for n, p in self._parameters().items()}
        out |= {"buffer/" + n: b for n, b in _plain(self._module.named_buffers()).items() if n in kept}
        if self._average:
            out |= {"average/" + n: local(v) for n, v in _plain(self._average.values.items()).items()}
        return out

    def _found(self, tensors: Tensors, key: str, shape: torch.Size) -> torch.Tensor:
        found: torch.Tensor | None = tensors.get(key)
        if found is None or found.shape != shape:
            raise self._store.damaged(key)
        return found

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in _plain(self._module.named_parameters()).items() if p.requires_grad}

    def _state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._optimizer.optimizer.state[parameter]
        return state


def _plain(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Without the wrapper of copies that exchange gradients, so that one process reads what several wrote."""
    return {name.removeprefix("module."): value for name, value in named}


def _optimizer(task: Task) -> torch.optim.Optimizer:
    groups = [dict(g) for g in task.recipe.groups()]
    return torch.optim.AdamW(groups, lr=task.settings.lr, weight_decay=task.settings.weight_decay, fused=True)


def _factor(settings: Settings, step: int, steps: int) -> float:
    """Share of the learning rate that a step takes: a linear warm-up, then half a cosine down to a tenth (or no
    change).
    """
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    if settings.schedule == "constant":
        return warm
    done = max(step - settings.warmup, 0) / max(steps - settings.warmup, 1)
    return warm * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
