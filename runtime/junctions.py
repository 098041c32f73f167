"""What N-vium adds to a decoder: at each junction a norm, an adapter and a router; and the mixture that they define.

Arithmetic on plain tensors, differentiable: running and training use the same. Every part maps [..., hidden], so a part
does not know whether it sees one token or many. Source: N-vium (arXiv 2605.13190). Knows no blocks, no cache, no law.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor
from torch.nn.functional import gelu, logsigmoid, silu

from ..errors import FormatError
from ..quant.kernels import exits
from ..quant.linear import DenseLinear
from .architecture import Architecture
from .attention import RMSNorm
from .store import TensorStore

ROUTER_SHARE, ROUTER_STEP = 0.66, 8
HEAD_STD = 0.4
BODY_STD = 0.02
CONTINUE, EXIT = 0, 1
"""Rows of a router's head."""
_DAMAGED = "Convert the model again, or fetch the bundle again."
_FLOAT32 = ("router.norm.weight", "router.head.weight", "router.head.bias")  # what decides the probability of leaving


class Adapter:
    """x + W2 SiLU(W1 x), without biases: what an exit changes in a normalised state before the head reads it."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        self._up, self._down = DenseLinear(up), DenseLinear(down)
        self.nbytes = self._up.nbytes + self._down.nbytes
        pair = exits.Pair.of((up, down))
        self._few = None if pair is None else exits.Adapter(pair)

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., hidden] to the same shape and dtype."""
        few = self._few
        if few is not None and few.pair.fits(x):
            return few(x)
        return x + self._down(silu(self._up(x)))


class Router:
    """How much a token wants to leave: two products with a GELU between, a norm, and the difference of two logits."""

    def __init__(self, tensors: Mapping[str, Tensor], eps: float) -> None:
        self._biases = tensors["inner.bias"], tensors["outer.bias"]
        self._inner, self._outer = map(DenseLinear, (tensors["inner.weight"], tensors["outer.weight"]), self._biases)
        self.nbytes = self._inner.nbytes + self._outer.nbytes
        self._norm, self._eps = RMSNorm(tensors["norm.weight"], eps, offset=False), eps
        self._weight, self._bias = tensors["head.weight"], tensors["head.bias"]
        self._trained = self._weight.requires_grad
        weight, bias = self._subtract()
        self._difference = self._norm.weight.detach() * weight.detach(), float(bias.detach())

    def native(self, norm: RMSNorm) -> exits.Look | None:
        """`norm` and the router behind it as one call; None where there is none."""
        pair = exits.Pair.of((self._inner.weight, self._outer.weight), self._biases)
        if pair is None or norm.native_factor is None or self._trained:
            return None
        return exits.Look(pair, norm.native_factor, self._difference[0], self._eps)

    @property
    def offset(self) -> float:
        """The bias of every score."""
        return self._difference[1]

    def __call__(self, x: Tensor) -> Tensor:
        """From normalised x [..., hidden] to s_exit - s_continue [...], float32; its sigmoid is r_k."""
        u = self._inside(x)
        if not self._trained:  # the norm's factor is part of the head, its division of one number a token
            weight, bias = self._difference
            return (u @ weight) * (u.square().mean(-1) + self._eps).rsqrt() + bias
        weight, bias = self._subtract()
        return (self._norm(u) * weight).sum(-1) + bias  # autocast would round a product's factors

    def _inside(self, x: Tensor) -> Tensor:
        return self._outer(gelu(self._inner(x))).float()

    def shifted(self, bias: float) -> "Router":
        """The same with `bias` added to every score: above 0, tokens leave sooner."""
        other = copy.copy(self)
        weight, offset = self._difference
        other._difference = weight, offset + bias  # noqa: SLF001 - a copy of itself
        return other

    def _subtract(self) -> tuple[Tensor, Tensor]:
        return self._weight[EXIT] - self._weight[CONTINUE], self._bias[EXIT] - self._bias[CONTINUE]


@dataclass(frozen=True)
class Junction:
    """A place after `layers` blocks where a token may leave."""

    layers: int
    norm: RMSNorm
    adapter: Adapter
    router: Router
    few: exits.Look | None = None

    def look(self, h: Tensor) -> tuple[Tensor, list[float]]:
        """From few states h [R, hidden] to normalised ones and their scores as numbers; nothing is differentiated."""
        if self.few is not None and self.few.pair.fits(h):
            return self.few(h, self.router.offset)
        x = self.norm(h)
        return x, self.router(x).tolist()

    def read(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """From the residual stream h [..., hidden] to what the head multiplies [..., hidden] and the score [...].

        The score is float32; its sigmoid is r_k, the probability of leaving of a token that came this far.
        """
        x = self.norm(h)
        return self.adapter(x), self.router(x)


class Junctions(Sequence[Junction]):
    """All junctions, from the first to leave at on, and the last exit's adapter where it has one."""

    def __init__(self, junctions: Sequence[Junction], final: Adapter | None) -> None:
        self._junctions = tuple(junctions)
        self.final = final

    @classmethod
    def of(cls, arch: Architecture, points: Sequence[int], tensors: Mapping[str, Tensor]) -> "Junctions":
        """From tensors by their stored names, used as they are: parameters are trained through.

        `points[k - 1]` is the number of blocks before junction k.
        """
        up, down = (tensors.get(f"final.adapter.{name}.weight") for name in ("up", "down"))
        final = None if up is None or down is None else Adapter(up, down)
        return cls(
            [_junction(arch, layers, _part(tensors, f"junctions.{k}.")) for k, layers in enumerate(points, start=1)],
            final,
        )

    @property
    def points(self) -> tuple[int, ...]:
        """Blocks before each junction."""
        return tuple(junction.layers for junction in self._junctions)

    def shifted(self, bias: float) -> "Junctions":
        """The same with `bias` added to every router's score: another depth, without training."""
        moved = [replace(junction, router=junction.router.shifted(bias)) for junction in self._junctions]
        return Junctions(moved, self.final)

    def adapt_final(self, x: Tensor) -> Tensor:
        """What the head multiplies at the model's end, from the finally normalised x [..., hidden]."""
        return x if self.final is None else self.final(x)

    def __len__(self) -> int:
        return len(self._junctions)

    @overload
    def __getitem__(self, index: int) -> Junction: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Junction]: ...
    def __getitem__(self, index: int | slice) -> Junction | Sequence[Junction]:
        return self._junctions[index]


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _junction(arch: Architecture, layers: int, tensors: Mapping[str, Tensor]) -> Junction:
    norm = RMSNorm(tensors["norm.weight"], arch.norm_eps, offset=False)
    adapter = Adapter(tensors["adapter.up.weight"], tensors["adapter.down.weight"])
    router = Router(_part(tensors, "router."), arch.norm_eps)
    return Junction(layers, norm, adapter, router, router.native(norm))


def log_weights(scores: Sequence[Tensor]) -> list[Tensor]:
    """From the scores [...] of all N - 1 junctions to log p_k [...] of all N exits: the mixture's weights.

    p_k = r_k (1 - r_1) ... (1 - r_(k-1)), and the rest is the last exit's.
    """
    staying = [logsigmoid(-score) for score in scores]
    reached = [torch.zeros_like(scores[0])]
    for stays in staying:
        reached.append(reached[-1] + stays)
    return [before + logsigmoid(score) for before, score in zip(reached, scores, strict=False)] + reached[-1:]


def weights(scores: Sequence[Tensor]) -> list[Tensor]:
    """From the scores [...] of all junctions to p_k [...] of all exits, which sum to 1."""
    return [weight.exp() for weight in log_weights(scores)]


def equal_points(layers: int, exits: int) -> tuple[int, ...]:
    """Blocks before each of `exits` - 1 junctions that cut a stack of `layers` as evenly as whole blocks allow."""
    return tuple(round(layers * k / exits) for k in range(1, exits))


def router_width(hidden: int) -> int:
    """Width inside a router: 0.66 of the model's, rounded up to a multiple of 8."""
    return -(-math.ceil(ROUTER_SHARE * hidden) // ROUTER_STEP) * ROUTER_STEP


def junction_tensors(arch: Architecture, count: int, *, width: int, final_adapter: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of `count` junctions whose routers are `width` wide inside. All are float32."""
    d = arch.hidden_size
    adapter = {"adapter.up.weight": (d, d), "adapter.down.weight": (d, d)}
    junction: dict[str, tuple[int, ...]] = {"norm.weight": (d,), **adapter}
    junction |= {"router.inner.weight": (width, d), "router.inner.bias": (width,)}
    junction |= {"router.outer.weight": (d, width), "router.outer.bias": (d,), "router.norm.weight": (d,)}
    junction |= {"router.head.weight": (2, d), "router.head.bias": (2,)}
    named = {f"junctions.{k}.{name}": shape for k in range(1, count + 1) for name, shape in junction.items()}
    return named | {f"final.{name}": shape for name, shape in adapter.items() if final_adapter}


def load_junctions(
    arch: Architecture,
    store: TensorStore,
    points: Sequence[int],
    *,
    width: int,
    final_adapter: bool,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Junctions:
    """Read all junctions; products in `dtype`, the router's norm and head in float32.

    Raises FormatError where a tensor is missing, left over, misshapen or holds no numbers.
    """
    expected = junction_tensors(arch, len(points), width=width, final_adapter=final_adapter)
    names = set(store.names())
    for what, found in (("lack", expected.keys() - names), ("have one too many:", names - expected.keys())):
        if found:
            raise FormatError(f"The junctions {what} {min(found)}", _DAMAGED)
    tensors = {name: _read(store, name, shape) for name, shape in expected.items()}
    return Junctions.of(
        arch,
        points,
        {name: tensor.to(device, None if name.endswith(_FLOAT32) else dtype) for name, tensor in tensors.items()},
    )


def _read(store: TensorStore, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = store.read(name)
    if tuple(tensor.shape) != shape:
        raise FormatError(f"{name} has shape {tuple(tensor.shape)}, not {shape}", _DAMAGED)
    tensor = tensor.float()
    if not bool(tensor.isfinite().all()):
        raise FormatError(f"{name} holds values that are no numbers", _DAMAGED)
    return tensor


def start(
    arch: Architecture,
    points: Sequence[int],
    final_norm: Tensor,
    seed: int,
    *,
    early_bias: float = 0.0,
    final_adapter: bool = False,
) -> dict[str, Tensor]:
    """Junctions before training, float32, by their stored names.

    Every exit begins as the model's own: its norm is the final one (`final_norm` as the backbone stores it), its
    adapter changes nothing. `early_bias` is added to every score: 0 leaves each router near one half (the authors'
    start from scratch), clearly negative makes the mixture nearly the dense model (for one that is trained already).
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = junction_tensors(arch, len(points), width=router_width(arch.hidden_size), final_adapter=final_adapter)
    std = {
        "adapter.up.weight": 1 / math.sqrt(arch.hidden_size),
        "router.inner.weight": BODY_STD,
        "router.outer.weight": BODY_STD,
        "router.head.weight": HEAD_STD / math.sqrt(arch.hidden_size),
    }

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        part = name.split(".", 2 if name.startswith("junctions.") else 1)[-1]
        match part:
            case "norm.weight":
                weight = final_norm.detach().float().cpu()
                return (1.0 + weight if arch.norm_offset else weight).clone()
            case "router.norm.weight":
                return torch.ones(shape)
            case "router.head.bias":
                return torch.tensor([0.0, early_bias])
            case _:
                return torch.randn(shape, generator=generator) * std[part] if part in std else torch.zeros(shape)

    return {name: make(name, shape) for name, shape in shapes.items()}
