"""What `adapt convert --method nvium` was asked for, as data. Knows no models."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .depth_control import BETA, FIRST
from .request import choice, demand
from .training_request import TrainingRequest

EXITS = 4
RATE_SCRATCH, RATE_ALL, RATE_ROUTERS = 1e-3, 1e-4, 1e-3
"""Learning rates. From scratch as the authors' small models (papers: N-vium); the others ours."""


@dataclass(frozen=True)
class NviumSettings(TrainingRequest):
    """N-vium as asked for. Blocks are counted from 1.

    exits: how many, at equal distances (default 4); junctions: after which blocks, instead.
    beta: what the whole depth costs, in nats; target_depth: the share of the blocks that a controller, which begins
    with `beta`, steers it to.
    train: the junctions alone, beside a frozen backbone, or all weights (from_scratch: all, whatever it says).
    from_scratch: the source gives a configuration and a tokenizer, and the weights are drawn.
    """

    method: ClassVar[str] = "nvium"
    exits: int | None = None
    junctions: tuple[int, ...] | None = None
    beta: float | None = None
    target_depth: float | None = None
    train: Literal["routers", "all"] | None = None
    from_scratch: bool = False

    @property
    def trained(self) -> Literal["routers", "all", "scratch"]:
        """What training changes."""
        return "scratch" if self.from_scratch else self.train or "routers"

    @property
    def default_rate(self) -> float:
        """See `TrainingRequest.default_rate`."""
        return {"scratch": RATE_SCRATCH, "all": RATE_ALL, "routers": RATE_ROUTERS}[self.trained]

    @property
    def price(self) -> float:
        """Beta when training begins."""
        if self.beta is not None:
            return self.beta
        return BETA if self.target_depth is None else FIRST

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(bool(self.data), "nvium trains its junctions, and there is no text to train on", "Name it with --data.")
        demand(
            self.exits is None or self.junctions is None,
            "the exits are named twice",
            "Give --exits or --junctions.",
        )
        demand(self.exits is None or self.exits >= 1, f"--exits {self.exits} is not positive")
        alone = self.exits == 1 and not self.from_scratch
        demand(
            not alone, "--exits 1 leaves nothing to train", "It is the dense twin of a model trained --from-scratch."
        )
        if self.junctions is not None:
            rising = list(self.junctions) == sorted(set(self.junctions)) and min(self.junctions, default=0) >= 1
            demand(rising, "--junctions must rise from 1", "Write them as 6,12,18.")
        priced = self.beta is not None or self.target_depth is not None
        demand(not (self.exits == 1 and priced), "with --exits 1 every token runs all blocks, whatever depth costs")
        demand(self.beta is None or self.beta >= 0, f"--beta {self.beta} is negative")
        demand(
            self.target_depth is None or 0 < self.target_depth <= 1,
            f"--target-depth {self.target_depth} is no share of the blocks",
            "0.6 runs 60 % of them on average.",
        )
        choice("--train", self.train, ("routers", "all", None))
        routers = self.from_scratch and self.train == "routers"
        demand(not routers, "--from-scratch trains all weights, not only routers", "Leave --train out.")
