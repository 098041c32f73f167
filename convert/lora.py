"""Low-rank adaptation: a trained product of two small matrices beside a frozen one (arXiv 2106.09685, section 4.1).

A `LoraLinear` is a `quant.linear.Linear`, so that the forward of running trains it. Before saving it is merged. Knows
no files and no training loop.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..errors import UsageError
from ..quant.linear import Linear
from ..runtime.architecture import Architecture

TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "q": ("q_proj", "qkv_proj"),
        "k": ("k_proj", "qkv_proj"),
        "v": ("v_proj", "qkv_proj"),
        "o": ("o_proj",),
        "gate": ("gate_proj", "gate_up_proj"),
        "up": ("up_proj", "gate_up_proj"),
        "down": ("down_proj",),
    }
)
"""What a user names, and the matrices that it stands for; a fused matrix is adapted as one."""


@dataclass(frozen=True)
class LoraSettings:
    """Rank r, alpha (the product counts alpha / r times; None: 2 r), and which matrices of every block.

    Raises UsageError for a rank below 1, an alpha that is not positive, or an unknown target.
    """

    rank: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] = tuple(TARGETS)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"LoRA rank {self.rank} is not positive", "Use 8 to 64.")
        if self.scale <= 0:
            raise UsageError(f"LoRA alpha {self.alpha} is not positive", "Twice the rank is usual.")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            raise UsageError(f"LoRA has no target {', '.join(unknown) or 'at all'}", f"Known: {', '.join(TARGETS)}.")

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class LoraLinear:
    """y = base(x) + scale * (x @ down.T) @ up.T, with down [r, K] and up [N, r]."""

    def __init__(self, base: Linear, down: Tensor, up: Tensor, scale: float) -> None:
        self.base, self.down, self.up, self.scale = base, down, up, scale
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def nbytes(self) -> int:
        """Bytes of the frozen product and of both matrices."""
        return self.base.nbytes + self.down.nbytes + self.up.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., K] to [..., N] of the same dtype."""
        low = linear(x, self.down.to(x.dtype))
        return self.base(x) + linear(low * self.scale, self.up.to(x.dtype))


def adapted(arch: Architecture, targets: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The matrices that these targets stand for: name without `.weight` -> (N, K)."""
    wanted = {matrix for target in targets for matrix in TARGETS[target]}
    return {
        name.removesuffix(".weight"): shape
        for index in range(arch.num_layers)
        for name, shape in arch.block_matrices(index).items()
        if name.removesuffix(".weight").rpartition(".")[2] in wanted
    }


def parameter_names(matrix: str) -> tuple[str, str]:
    """The names of the matrices down and up beside `matrix` (no `.weight`)."""
    return f"{matrix}.lora_down", f"{matrix}.lora_up"


def start(arch: Architecture, settings: LoraSettings, *, device: torch.device | str) -> dict[str, Tensor]:
    """Return float32 matrices to begin with: down as `nn.Linear` starts, up zero, so that nothing changes yet."""
    generator = torch.Generator().manual_seed(settings.seed)
    made: dict[str, Tensor] = {}
    for matrix, (N, K) in adapted(arch, settings.targets).items():
        down, up = parameter_names(matrix)
        bound = 1 / math.sqrt(K)
        values = torch.empty(settings.rank, K).uniform_(-bound, bound, generator=generator)
        made[down], made[up] = values.to(device), torch.zeros(N, settings.rank, device=device)
    return made


def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the weight [N, K] that alone gives what `LoraLinear` gives, in the dtype of `weight`."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale).to(weight.dtype)
