"""The training loop: batches in, better weights out, with checkpoints to go on from.

What is minimised is the caller's objective. A step depends on the settings, the data and the weights before it only,
so a run that was killed goes on as if it had not been. Several processes share the passes of a step and add up their
gradients once. Knows no method and no files of tokens.
"""

import json
import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..errors import AdaptError, UsageError
from ..runtime.progress import Reporter, SilentReporter
from . import checkpoint
from .checkpoint import Checkpoint
from .differences import differences
from .history import History, Logged, Pace, due
from .processes import Processes, join
from .reused_memory import reused_memory
from .sequences import Batch, Order
from .steering import Learner, Steering
from .trainable import Trainable
from .training_settings import TrainingSettings


class Sampled(Protocol):
    """What training draws its batches from; `sequences.Sequences` is one."""

    def __len__(self) -> int: ...

    def batch(self, indices: list[int]) -> Batch:
        """These sequences, side by side."""
        ...


M = TypeVar("M", bound=Learner)
M_contra = TypeVar("M_contra", bound=Learner, contravariant=True)


class Objective(Protocol[M_contra]):
    """What a method minimises, for the kind of model that it trains."""

    def __call__(self, model: M_contra, batch: Batch, draws: random.Random) -> tuple[Tensor, int]:
        """The summed loss of the batch, a scalar, and over how many terms; training minimises their mean.

        Whatever is random comes from `draws`, which depends on the seed, the step and the pass, never on the process.
        """
        ...


def next_token(model: Trainable, batch: Batch, draws: random.Random) -> tuple[Tensor, int]:  # noqa: ARG001 - see Objective
    """Plain language modelling: the mean cross-entropy of a token. An `Objective`."""
    return model(batch.ids, batch.targets, batch.counts), batch.counted


Evaluation = Callable[[M], Mapping[str, float]]


def train(
    model: M,
    data: Sampled,
    settings: TrainingSettings,
    objective: Objective[M],
    folder: Path,
    *,
    reporter: Reporter,
    evaluate: Evaluation[M] | None = None,
    key: Mapping[str, Any] | None = None,
    steering: Steering | None = None,
) -> History:
    """Train `model` in place and return what happened; `folder` holds the checkpoints, and a run there is taken up.

    `key` is what else the result depends on (data, method), as JSON: a checkpoint made with another is refused.
    `evaluate` runs after every `evaluate_every` steps, in the leading process, without gradients. `steering` is told of
    every step, and its state is part of a checkpoint.

    Raises UsageError for a checkpoint of other settings, AdaptError where accelerate is missing or the loss is no
    number, ResourceError on a full disk. An interrupted run (Ctrl-C) leaves a checkpoint of its last whole step.
    """
    processes = join(next(model.parameters()).device)
    run = _Run(model, data, settings, objective, processes=processes, steering=steering)
    run.resume(folder, {**settings.key(), **(key or {})})
    with reused_memory() if processes.device.type == "cpu" else nullcontext():
        return run.all_steps(reporter if processes.leads else SilentReporter(), evaluate)


class _Run(Generic[M]):
    """One call of `train`: the optimiser, where it is, and what happened so far."""

    def __init__(
        self,
        model: M,
        data: Sampled,
        settings: TrainingSettings,
        objective: Objective[M],
        *,
        processes: Processes,
        steering: Steering | None,
    ) -> None:
        if len(data) == 0:
            raise UsageError("There is nothing to train on")
        self._model, self._data, self._settings, self._objective = model, data, settings, objective
        self._processes, self._steering = processes, steering
        self._parameters = model.trained()
        self._order = Order(len(data), settings.seed)
        self._optimizer = _optimizer(self._parameters, settings)
        self._history = History()
        self._step = 0  # steps done
        self._measured: list[float] = []  # by all processes, for `steering`

    def resume(self, folder: Path, key: Mapping[str, Any]) -> None:
        """Keep checkpoints in `folder`, and go on from the newest, if there is one and it has this key."""
        self._folder, self._key = folder, key
        self._saved_at, self._saved_when = 0, time.monotonic()
        saved = checkpoint.load(folder)
        if saved is None:
            return
        self._check(saved)
        checkpoint.restore(self._optimizer, self._parameters, saved)
        self._history = History.from_json(saved.state["history"])
        if self._steering is not None:
            self._steering.restore(saved.state["steering"])
        self._step = self._saved_at = saved.state["updates"]

    def all_steps(self, reporter: Reporter, evaluate: Evaluation[M] | None) -> History:
        """Every step that is left. A finished run is a checkpoint too."""
        settings = self._settings
        pace = Pace(self._step, settings, reporter)
        with reporter.task("Training", settings.steps) as task:
            task.advance(self._step)
            while self._step < settings.steps:
                began = time.monotonic()
                tokens = self._one_step()
                self._history.seconds += time.monotonic() - began
                task.advance(1)
                pace.tell(self._history, tokens, "" if self._steering is None else self._steering.told())
                if evaluate is not None and due(self._step, settings.evaluate_every):
                    self._evaluate(evaluate, reporter)
                if self._wants_saving():
                    self._save()
        if self._saved_at < self._step:
            self._save()
        self._processes.wait()
        return self._history

    def _one_step(self) -> int:
        """One optimiser step; tokens read by all processes."""
        try:
            loss, terms, tokens = self._gradients()
        except KeyboardInterrupt:  # the weights are those of the last whole step
            self._save()
            raise
        norm = self._scale(terms)
        self._check_finite(loss, norm)
        rate = self._settings.rate(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        if self._steering is not None:
            self._steering.finish(self._measured)
        self._history.steps.append(Logged(self._step, loss / terms, rate, norm, terms))
        self._history.tokens += tokens
        return tokens

    def _gradients(self) -> tuple[float, int, int]:
        """Gradients of the summed loss, added over all processes; the sum, its terms, tokens read."""
        settings, processes = self._settings, self._processes
        total, terms, tokens = 0.0, 0, 0
        if self._steering is not None:
            self._steering.begin(self._step)
        first = self._step * settings.batch_size
        for number, places in enumerate(settings.passes(processes.count)):
            if number % processes.count != processes.index:
                continue
            batch = self._data.batch(self._order.take(first + places.start, len(places)))
            loss, counted = self._one_pass(batch.to(processes.device), number)
            total, terms, tokens = total + loss, terms + counted, tokens + sum(batch.counts)
        measured = [] if self._steering is None else self._steering.sums()
        sums = torch.tensor([total, terms, tokens, *measured], dtype=torch.float64)
        self._share(sums)
        total, terms, tokens, *self._measured = sums.tolist()
        return total, max(1, int(terms)), int(tokens)

    def _one_pass(self, batch: Batch, number: int) -> tuple[float, int]:
        draws = random.Random(f"{self._settings.seed}:{self._step}:{number}")  # noqa: S311 - not for secrets
        with self._precision():
            loss, terms = self._objective(self._model, batch, draws)
        if loss.requires_grad:  # not where nothing counts
            loss.backward()
        return float(loss.detach()), terms

    def _share(self, sums: Tensor) -> None:
        """Add up gradients and figures. What a process did not need has a gradient of 0, as in a single process."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        device = self._processes.device
        moved = sums.to(device, torch.float64 if device.type != "mps" else torch.float32)
        self._processes.add_up([moved, *_gradients_of(self._parameters)])
        sums.copy_(moved)

    def _scale(self, terms: int) -> float:
        """Make the gradients those of the mean, and clip them; the norm before clipping."""
        grads = _gradients_of(self._parameters)
        norm = float(nn.utils.get_total_norm(grads)) / terms
        limit = self._settings.clip_norm
        factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        for grad in grads:
            grad.mul_(factor / terms)
        return norm

    def _check_finite(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = f"The loss of step {self._step + 1} is {loss}, its gradient's norm {norm}"
        raise AdaptError(what, "Use a lower learning rate, or --dtype fp32.")

    def _precision(self) -> AbstractContextManager[Any]:
        if self._settings.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._processes.device.type, torch.bfloat16)

    def _evaluate(self, evaluate: Evaluation[M], reporter: Reporter) -> None:
        if self._processes.leads:
            with torch.no_grad(), self._precision():
                figures = dict(evaluate(self._model))
            self._history.evaluations[self._step] = figures
            shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            reporter.note(f"step {self._step}/{self._settings.steps}  held out: {shown}")
        self._processes.wait()

    def _wants_saving(self) -> bool:
        minutes = self._settings.checkpoint_minutes
        late = minutes is not None and time.monotonic() - self._saved_when >= 60 * minutes
        return late or due(self._step, self._settings.checkpoint_steps)

    def _save(self) -> None:
        if self._processes.leads and self._saved_at < self._step:
            state = {"key": dict(self._key), "updates": self._step, "history": self._history.to_json()}
            if self._steering is not None:
                state["steering"] = self._steering.state()
            checkpoint.save(self._folder, self._step, checkpoint.moments(self._optimizer, self._parameters), state)
        self._saved_at, self._saved_when = self._step, time.monotonic()

    def _check(self, saved: Checkpoint) -> None:
        changes = differences(saved.state["key"], json.loads(json.dumps(self._key)))
        if changes:
            what = f"The checkpoint in {self._folder.name} is of another training: {'; '.join(changes)}"
            had = saved.state["key"].get("micro_batch")
            again = f"Go on with --micro-batch {had}, or use" if had and had != self._key["micro_batch"] else "Use"
            raise UsageError(what, f"{again} --no-resume to start afresh.")


def mean_loss(model: Trainable, data: Sampled, *, batch_size: int = 4, sources: list[int] | None = None) -> float:
    """The mean cross-entropy of a token in nats over all sequences, without gradients; perplexity is its exponential.

    `sources` as in `Trainable.hidden`.
    """
    device = next(model.parameters()).device
    total, counted = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(data), batch_size):
            batch = data.batch(list(range(start, min(start + batch_size, len(data))))).to(device)
            total += float(model(batch.ids, batch.targets, batch.counts, sources))
            counted += batch.counted
    return total / max(1, counted)


def _optimizer(parameters: Mapping[str, nn.Parameter], settings: TrainingSettings) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    others = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)


def _gradients_of(parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
