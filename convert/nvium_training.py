"""How N-vium trains: all weights, in every process of a training, or junctions beside a frozen backbone in one.

Knows the plan, the source and the loop; not the bundle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..quant.linear import DenseLinear
from ..runtime.decoder import FINAL_NORM
from ..runtime.junctions import start
from ..runtime.progress import Reporter, SilentReporter
from .data import TrainingData
from .depth_control import DepthControl
from .exit_fit import fit_exits, fit_tokens
from .frozen_blocks import frozen_frame, keeps_blocks, reading_dtype
from .junction_training import JunctionModel, StateWriter
from .loop_training import prepare
from .nvium_model import Mixed, MixtureObjective, Reads
from .nvium_plan import Plan
from .processes import Processes
from .sequences import Order
from .trainable import Trainable
from .training import Sampled, next_token, train
from .workspace import Workspace
from .writer import read_piece, write_piece

TRAINED, FITTED = "trained.safetensors", "fitted-junctions.safetensors"
"""The pieces of the work folder that hold the trained backbone, and junctions that are not trained yet."""


PIECES_TOGETHER = 8
"""Pieces of states that climb side by side where blocks are not kept: a block is read for some 32,000 tokens."""


@dataclass(frozen=True)
class Run:
    """What a training came to: the tokens that it saw, and the last price of depth."""

    tokens: int
    beta: float


def control_of(plan: Plan) -> DepthControl:
    """The price of depth at the beginning of a training."""
    settings = plan.settings
    return DepthControl(settings.steps, beta=settings.price, target=settings.target_depth)


def key_of(plan: Plan, data: TrainingData) -> dict[str, object]:
    """What a checkpoint depends on besides the numbers of the loop, as JSON."""
    settings = plan.settings
    own = {"points": list(plan.points), "beta": settings.price, "target_depth": settings.target_depth}
    return {**plan.key(data), **own, "trained": settings.trained}


def started(plan: Plan) -> Mapping[str, Tensor]:
    """The junctions before training."""
    norm = plan.source.store.read(FINAL_NORM)
    return start(plan.arch, plan.points, norm, plan.settings.seed, final_adapter=plan.final_adapter)


class Trainer:
    """What every process of a training does: the same data, the same model, the same steps."""

    def __init__(self, plan: Plan, folder: Path, processes: Processes) -> None:
        self._plan, self._folder, self._processes = plan, folder, processes

    def follow(self) -> None:
        """Train with the leading process, once it has made the data; unless the weights are there already."""
        self._processes.wait()
        if not (self._folder / "pieces" / TRAINED).is_file():
            self.run(prepare(self._plan, self._folder, SilentReporter()), SilentReporter())

    def run(self, data: TrainingData, reporter: Reporter) -> tuple[Trainable, Run]:
        """Train all weights; return the model, and what it came to."""
        plan, folder = self._plan, self._folder / "training"
        store, device, key = plan.source.store, self._processes.device, key_of(plan, data)
        if not plan.points:
            plain = Trainable(plan.arch, store, device=device, checkpointing=plan.checkpointing)
            history = train(plain, data.train, plan.steps, next_token, folder, reporter=reporter, key=key)
            return plain, Run(history.tokens, 0.0)
        model = Mixed(plan.arch, store, plan.points, started(plan), device=device, checkpointing=plan.checkpointing)
        return model, self._mixture(model, data.train, key, reporter)

    def run_junctions(self, data: TrainingData, work: Workspace, reporter: Reporter) -> tuple[dict[str, Tensor], Run]:
        """Train the junctions alone; return them by their stored names, and what it came to."""
        plan, settings = self._plan, self._plan.settings
        dtype = reading_dtype(plan.opened)
        frame = frozen_frame(plan.opened, plan.source.store, dtype, plan.device)
        together = 1 if keeps_blocks(plan.arch, dtype, plan.device) else PIECES_TOGETHER
        order = Order(len(data.train), settings.seed)
        chosen = order.take(0, min(len(data.train), settings.steps * settings.batch_size))
        writer = StateWriter(frame, plan.points, together, fit_tokens(plan.arch.hidden_size))
        states = writer.write(work, data.train, chosen, reporter)
        if not isinstance(frame.head, DenseLinear):
            raise TypeError("the head of a frozen backbone is dense")
        head = frame.head.weight.to(torch.bfloat16 if plan.precision == "bf16" else torch.float32)
        del frame  # its blocks are done
        if not work.has(FITTED):
            reporter.note("Fit the exits to the last one")
            write_piece(work, FITTED, fit_exits(started(plan), states.ends(), head, plan.arch.norm_eps))
        model = JunctionModel(plan.arch, plan.points, read_piece(work, FITTED), head, device=plan.device)
        run = self._mixture(model, states, key_of(plan, data), reporter)
        return model.junction_tensors(), run

    def _mixture(self, model: Reads, data: Sampled, key: Mapping[str, object], reporter: Reporter) -> Run:
        plan, control = self._plan, control_of(self._plan)
        objective, folder = MixtureObjective(control, plan.depths), self._folder / "training"
        history = train(model, data, plan.steps, objective, folder, reporter=reporter, key=key, steering=control)
        return Run(history.tokens, control.beta)
