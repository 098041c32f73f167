"""What `adapt convert --method rcla` was asked for, as data. Knows no models."""

from dataclasses import dataclass
from typing import ClassVar, get_args

from ..runtime.methods import CrossDraw
from .request import choice, demand
from .training_request import TrainingRequest

RATE_FULL, RATE_LORA = 5e-6, 1e-4
"""Learning rates (papers: R-CLA section 4.1 for full tuning; what LoRA usually takes)."""


@dataclass(frozen=True)
class RclaSettings(TrainingRequest):
    """R-CLA as asked for. Layers are counted from 1. One of the first three says which layers keep a cache.

    share_every: the first of every so many layers keeps its cache, the others read it (default 4).
    keep_layers: the keepers, named. keep_ratio: a share of layers, chosen by the loss on some of the training text.
    cross_prob: probability that a layer reads an earlier layer's keys and values in a training pass.
    plain_passes: share of the training passes in which every layer reads its own.
    cross_draw, distill: see `cross_layer.CrossLayer`.
    lora: rank; None trains all weights.
    """

    method: ClassVar[str] = "rcla"
    share_every: int | None = None
    keep_layers: tuple[int, ...] | None = None
    keep_ratio: float | None = None
    cross_prob: float = 0.6
    plain_passes: float = 0.0
    cross_draw: CrossDraw = "layers"
    distill: float | None = None
    lora: int | None = None

    @property
    def default_rate(self) -> float:
        """See `TrainingRequest.default_rate`."""
        return RATE_FULL if self.lora is None else RATE_LORA

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [self.share_every is not None, self.keep_layers is not None, self.keep_ratio is not None]
        demand(
            sum(given) <= 1,
            "the layers that keep a cache are named twice",
            "Give --share-every or --keep-layers or --keep-ratio.",
        )
        demand(self.share_every is None or self.share_every >= 1, f"--share-every {self.share_every} is not positive")
        demand(self.keep_ratio is None or 0 < self.keep_ratio <= 1, f"--keep-ratio {self.keep_ratio} is not in (0, 1]")
        if self.keep_layers is not None:
            rising = list(self.keep_layers) == sorted(set(self.keep_layers))
            demand(
                rising and self.keep_layers[:1] == (1,),
                "--keep-layers must rise from 1",
                "Layer 1 always keeps its cache: 1,5,9.",
            )
        for flag, share in (("--cross-prob", self.cross_prob), ("--plain-passes", self.plain_passes)):
            demand(0 <= share <= 1, f"{flag} {share} is no probability")
        choice("--cross-draw", self.cross_draw, get_args(CrossDraw))
        demand(self.distill is None or self.distill > 0, f"--distill {self.distill} is not positive")
        demand(
            self.lora is None or self.lora >= 1, f"--lora {self.lora} is not a rank", "Use 8 to 64, or leave it out."
        )
