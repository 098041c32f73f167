"""What `adapt tune` found, as the manifest keeps it: the frontier, what was chosen from it, and for which machine.

Knows no tensors. Layers are counted from 1, times are milliseconds a token of one sequence.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .method_settings import Sha256, Share, TextUsed
from .methods import Decision, LabelledRows

Positive = Annotated[float, Field(gt=0)]


class _Strict(BaseModel, frozen=True):
    model_config = ConfigDict(allow_inf_nan=False)


class BlockSpeed(_Strict, frozen=True):
    """Measured milliseconds of one token: a dense block, a 4-bit block, and what is neither (embedding, norm, head)."""

    device: str
    threads: Annotated[int, Field(gt=0)]
    dtype: str
    dense_block_ms: Positive
    river_block_ms: Positive
    rest_ms: Annotated[float, Field(ge=0)]
    lossless_ms: Positive | None = None
    """A token of lossless River, drafts and all, on the text that was tuned on; None: not measured."""

    def token_ms(self, dense_blocks: float, layers: int) -> float:
        """Time of a token that runs so many dense blocks, and the others in 4 bits."""
        blocks = dense_blocks * self.dense_block_ms + (layers - dense_blocks) * self.river_block_ms
        return self.rest_ms + blocks

    def speedup(self, dense_blocks: float, layers: int) -> float:
        """How many times as fast as the dense model."""
        return self.token_ms(layers, layers) / self.token_ms(dense_blocks, layers)

    def lossless_speedup(self, layers: int) -> float | None:
        """How many times as fast as the dense model its own text comes with drafts; None: not measured."""
        return None if self.lossless_ms is None else self.token_ms(layers, layers) / self.lossless_ms


class Figures(_Strict, frozen=True):
    """Quality on one half of the text. KL in nats, dense against this; `loss` is the growth of perplexity, a share.

    `kl` and `agreement` are None where only perplexities were measured (N-vium's biases).
    """

    perplexity: float
    loss: float
    kl: float | None = None
    agreement: Share | None = None
    mean_depth: float
    exit_histogram: tuple[int, ...] = ()

    @property
    def distance(self) -> float:
        """How far it is from the dense model: KL, or where that is not known the growth of perplexity."""
        return self.loss if self.kl is None else self.kl


class TunedPoint(_Strict, frozen=True):
    """One setting of a method. `settings` are the fields of the method's own that it stands for.

    `dense_blocks` is how many blocks a token runs with the backbone's weights, on average; `speedup` follows from it.
    """

    name: str
    settings: dict[str, Any]
    dense_blocks: Annotated[float, Field(ge=0)]
    speedup: Positive
    chosen_on: Figures
    held_out: Figures


class Tuned(_Strict, frozen=True):
    """One run of `tune`. `fingerprint` is of everything that its measurements depend on, but for speeds.

    `goal`: "max_loss", the fastest point that loses at most `limit`; "min_speed", the best of those at least `limit`
    times as fast as the dense model; "max_drop", as max_loss, of accuracy.
    """

    method: str
    data: TextUsed | LabelledRows
    fingerprint: Sha256
    seed: int
    goal: Literal["max_loss", "min_speed", "max_drop"]
    limit: Annotated[float, Field(ge=0)]
    chosen: str
    speed: BlockSpeed | None = None
    frontier: tuple[TunedPoint, ...] = ()
    held_out: dict[str, Decision] = Field(default_factory=dict)
    """For labelled rows: what full, 1d and 2d gave on those that nothing was chosen on."""

    @property
    def point(self) -> TunedPoint | None:
        """The chosen point of the frontier; None where the method keeps a frontier of its own (2D-EE)."""
        return next((point for point in self.frontier if point.name == self.chosen), None)
