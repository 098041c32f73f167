"""The operations between the products, on bf16 rows: RMS norm, gated activation, attention of one token.

They are a few microseconds of arithmetic for one token, in torch many times that. The C module behind them is that of
`native`; where it is missing or fails its check, `available()` is False and torch does the same. Nothing here is
differentiable. Knows no layers and no cache.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from . import native

GATES = {"silu": 0, "gelu_tanh": 1}  # enum in native.h
MAX_ROWS = 64  # of what one thread does; beyond, torch's threads pay
LONG = 512  # keys, those of several tokens added, from which on other threads are woken
CHECK_TOLERANCE = 0.01  # of the largest output: two roundings to bf16 differ by 0.008 at most


def available() -> bool:
    """Whether the operations can be used."""
    return _choice() >= 0


def instruction_sets() -> tuple[str, ...]:
    """Those that passed the check, best first; the first one is used."""
    return tuple(_checked()) if native.available() else ()


def cosines_fit(x: Tensor, y: Tensor) -> bool:
    """Whether `cosines` takes these: at most `MAX_ROWS` contiguous bf16 rows on the CPU, of one shape; no gradients."""
    plain = x.dtype is y.dtype is torch.bfloat16 and x.is_cpu and y.is_cpu and x.shape == y.shape and x.shape[-1] > 0
    few = plain and x.numel() <= MAX_ROWS * x.shape[-1] and x.is_contiguous() and y.is_contiguous()
    return few and not (x.requires_grad or y.requires_grad) and native.available()


def cosines(x: Tensor, y: Tensor) -> Tensor:
    """Cosines of the angles between rows of x and y [..., D], which must fit: float32 [...], from sums in float64."""
    out = torch.empty(x.shape[:-1])
    native.library().module.cosines(x.data_ptr(), y.data_ptr(), out.data_ptr(), out.numel(), x.shape[-1])
    return out


class RowNorm:
    """x / rms(x) * factor in fp32, rounded to bf16 once. `factor` float32 [D]."""

    def __init__(self, factor: Tensor, eps: float, *, isa: str | None = None) -> None:
        self.factor = _floats(factor, 1)
        self._at, self._width, self._eps = factor.data_ptr(), factor.shape[0], eps
        self._isa, self._team = index(isa), native.library().team
        self._call: Callable[..., None] = native.library().module.rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise bf16 x [..., D] over the last dimension. Raises ValueError for another x."""
        x = x.contiguous()
        check(x.dtype is torch.bfloat16 and x.is_cpu and x.shape[-1] == self._width, "x must be bf16 [..., D]")
        out = torch.empty_like(x)
        rows, way = x.numel() // self._width, (self._team, torch.get_num_threads(), self._isa)
        self._call(*way, x.data_ptr(), self._at, out.data_ptr(), rows, self._width, self._eps)
        return out


class Gate:
    """activation(gate) * up in fp32, rounded to bf16 once. `kind` is a key of `GATES`."""

    def __init__(self, kind: str, *, isa: str | None = None) -> None:
        self._kind, self._isa, self._team = GATES[kind], index(isa), native.library().team
        self._call: Callable[..., None] = native.library().module.gated

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gate and up bf16 [B, S, N], rows contiguous and evenly spaced -> [B, S, N]. Raises ValueError otherwise."""
        size, width = gate.numel(), gate.shape[-1]
        if gate.dtype is not torch.bfloat16 or up.dtype is not torch.bfloat16 or not gate.is_cpu or not up.is_cpu:
            raise ValueError("gate and up must be bf16 on the CPU")
        if up.numel() != size or up.shape[-1] != width:
            raise ValueError("gate and up must be of one shape")
        check(_even(gate) and _even(up), "rows of gate and up must be evenly spaced")
        out = gate.new_empty(gate.shape)
        way = self._team, torch.get_num_threads(), self._isa, self._kind
        strides = gate.stride(1), up.stride(1)
        self._call(*way, gate.data_ptr(), up.data_ptr(), out.data_ptr(), size // max(width, 1), width, *strides)
        return out


class TokenAttention:
    """One token of one sequence: its heads are normed and rotated, its key and value stored, then it attends.

    Several tokens in a row each get exactly what they would get alone; threads share tokens and groups of heads.
    `heads` queries of `width` over `groups` of keys and values. `factors` float32 [heads (+ groups), width] is a norm
    over each head of query and key, with `eps`.
    """

    def __init__(
        self,
        heads: int,
        groups: int,
        width: int,
        *,
        scale: float,
        factors: Tensor | None = None,
        eps: float = 0.0,
        isa: str | None = None,
    ) -> None:
        check(heads % groups == 0, "query heads must be a multiple of the heads of keys")
        self.factors = None if factors is None else _floats(factors, 2)
        self._at = 0 if factors is None else factors.data_ptr()
        self._sizes, self._floats = (heads, groups, width), (float(eps), float(scale))
        self._isa, self._team = index(isa), native.library().team
        self._call: Callable[..., None] = native.library().module.attend_rows

    def __call__(  # noqa: PLR0917 - keywords cost a microsecond per layer and token
        self,
        heads: Tensor,
        value: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        keys: Tensor,
        values: Tensor,
        seen: range,
        window: int | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Attend from the last S of `seen`, the tokens' positions, to those of `seen` up to each; S is often 1.

        heads bf16 [..., S, heads * width], with the keys of all groups behind where there is a value [..., S, groups *
        width]; cosine and signed sine [S, rotary]; keys and values [1, groups, capacity, width], written at the
        positions. Without a value nothing is stored. `window`: the last positions that a token sees, where fewer.
        Gives bf16 [1, S, heads * width]. Raises ValueError for other dtypes or sizes.
        """
        queries, groups, width = self._sizes
        own = (queries if value is None else queries + groups) * width
        rows, step = _spaced(heads, own)
        others, value_step = (rows, 0) if value is None else _spaced(value, groups * width)
        check(others == rows > 0, "heads and value must be bf16 rows of as many tokens")
        check(_plain(keys, keys.numel()) and _plain(values, keys.numel()), "keys and values must be bf16")
        check(keys.shape[0] == 1 and keys.shape[1] == groups and keys.shape[3] == width, "the cache does not fit")
        check(0 <= seen.start <= seen.stop - rows <= keys.shape[2] - rows, "positions outside the cache")
        turn, rotary = (0, 0), 0
        if cos is not None and sin is not None:
            rotary = cos.shape[-1]
            fits = _plain(cos, rows * rotary) and _plain(sin, rows * rotary) and rotary <= width
            check(fits, "the rotation does not fit")
            turn = (cos.data_ptr(), sin.data_ptr())
        threads = threads or (torch.get_num_threads() if len(seen) * rows > LONG else 1)
        out = heads.new_empty((1, rows, queries * width))
        places = (heads.data_ptr(), 0 if value is None else value.data_ptr(), *turn, self._at)
        stored = (keys.data_ptr(), values.data_ptr(), out.data_ptr())
        where = (rotary, keys.shape[2] * width, seen.start, seen.stop - rows, rows, step, value_step, window or 0)
        self._call(self._team, threads, self._isa, *places, *stored, *self._sizes, *where, *self._floats)
        return out

    def rows(  # noqa: PLR0917 - as `__call__`
        self,
        heads: Tensor,
        value: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        keys: Tensor,
        values: Tensor,
        seen: Sequence[range],
    ) -> Tensor:
        """One token of each of B sequences: heads and value [B, 1, ...], keys and values [B, groups, capacity, width].

        cos and sin are the same for all rows [1, rotary], or [B, 1, 1, rotary]. Gives bf16 [B, 1, heads * width], each
        row as `__call__` would. Raises ValueError as it does.
        """
        queries, groups, width = self._sizes
        count, capacity = len(seen), keys.shape[2]
        own = queries if value is None else queries + groups
        check(_by_row(heads, count, own * width), "heads must be bf16, one row per sequence")
        check(value is None or _by_row(value, count, groups * width), "values must be bf16, one row per sequence")
        for stored in (keys, values):
            fits = stored.shape == (count, groups, capacity, width) and stored[0].is_contiguous()
            check(fits and stored.dtype is torch.bfloat16 and stored.is_cpu, "the cache does not fit")
        fits = all(0 <= row.start < row.stop <= capacity and row.step == 1 for row in seen)
        check(fits, "positions outside the cache")
        rotary = 0 if cos is None or sin is None else cos.shape[-1]
        for turn in (cos, sin):
            rows = 1 if turn is None or turn.numel() == rotary else count
            check(turn is None or (_by_row(turn, rows, rotary) and rotary <= width), "the rotation does not fit")
        out = heads.new_empty((count, 1, queries * width))
        places = [_places(t, count) for t in (heads, value, cos, sin)]
        stored = [_places(t, count) for t in (keys, values, out)]
        most, spread = torch.get_num_threads(), capacity * width
        for row, positions in enumerate(seen):
            way = self._team, most if len(positions) > LONG else 1, self._isa
            own_places = [addresses[row] for addresses in places]
            where = (rotary, spread, positions.start, positions.stop - 1, 1, 0, 0, 0)
            at = [addresses[row] for addresses in stored]
            self._call(*way, *own_places, self._at, *at, *self._sizes, *where, *self._floats)
        return out


def _places(x: Tensor | None, count: int) -> Sequence[int]:
    """Addresses of the rows of x [count, ...]; of the only one `count` times where it has one; 0 for None."""
    if x is None:
        return (0,) * count
    first, step = x.data_ptr(), x.stride(0) * x.itemsize if x.shape[0] > 1 else 0
    return range(first, first + step * count, step) if step else (first,) * count


def _by_row(x: Tensor, count: int, size: int) -> bool:
    """Whether x is bf16 on the CPU, [count, ...] with `size` contiguous values in each row."""
    fits = x.shape[0] == count and x.numel() == count * size and x[:1].is_contiguous()
    return fits and x.dtype is torch.bfloat16 and x.is_cpu


def check(fits: bool, message: str) -> None:
    """Raise ValueError with this message where arguments do not fit."""
    if not fits:
        raise ValueError(message)


def _plain(x: Tensor, count: int) -> bool:
    return x.dtype is torch.bfloat16 and x.is_cpu and x.numel() == count and x.is_contiguous()


def _spaced(x: Tensor, width: int) -> tuple[int, int]:
    """Rows of a bf16 x [..., S, width] on the CPU, and how far apart they are; (0, 0) where x is not that."""
    if x.dtype is not torch.bfloat16 or not x.is_cpu or x.shape[-1] != width or x.stride(-1) != 1:
        return 0, 0
    rows = x.shape[-2] if x.dim() > 1 else 1
    return (rows, x.stride(-2) if rows > 1 else width) if x.numel() == rows * width else (0, 0)


def _even(x: Tensor) -> bool:
    """Whether the rows of x [B, S, N] are contiguous and one stride apart."""
    batch, rows, _ = x.shape
    return x.stride(2) == 1 and (batch == 1 or x.stride(0) == rows * x.stride(1))


def _floats(factor: Tensor, dimensions: int) -> Tensor:
    fits = factor.dtype is torch.float32 and factor.is_cpu and factor.dim() == dimensions and factor.is_contiguous()
    check(fits, "the factor of a norm must be contiguous float32")
    return factor


def index(name: str | None) -> int:
    """The instruction set to use."""
    checked = _checked()
    if name is None:
        return next(iter(checked.values()))
    check(name in checked, f"instruction set {name} is not usable here")
    return checked[name]


def _choice() -> int:
    return next(iter(_checked().values())) if native.available() else -1


@cache
def _checked() -> dict[str, int]:
    """The instruction sets that give what plain C gives. Plain C always passes."""
    found = native.library()
    scalar = found.isas["scalar"]
    expected = _samples(found.module, scalar)
    return {n: i for n, i in found.isas.items() if i == scalar or _agree(_samples(found.module, i), expected)}


def _agree(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        bool((one - other).abs().max() <= CHECK_TOLERANCE * other.abs().max())
        for one, other in zip(got, expected, strict=True)
    )


def _samples(module: ModuleType, isa: int) -> list[Tensor]:
    """What an instruction set, not trusted yet, makes of small inputs: widths with a rest, every number of heads."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, up, factor = normal(3, 77), normal(3, 77), torch.rand(77, generator=generator)
    results = [torch.zeros_like(x) for _ in range(3)]
    module.rms_norm(0, 1, isa, x.data_ptr(), factor.data_ptr(), results[0].data_ptr(), 3, 77, 1e-5)
    for kind, out in enumerate(results[1:]):
        module.gated(0, 1, isa, kind, x.data_ptr(), up.data_ptr(), out.data_ptr(), 3, 77, 77, 77)
    for size in range(1, 9):
        width, groups, count = 20 + 4 * size, 2, 150
        heads, value, turn = normal((size + 1) * groups * width), normal(groups * width), normal(2, width)
        keys, values = normal(groups, count, width), normal(groups, count, width)
        out = torch.zeros(size * groups * width, dtype=torch.bfloat16)
        at = [tensor.data_ptr() for tensor in (heads, value, *turn.unbind())]
        stored = [tensor.data_ptr() for tensor in (keys, values, out)]
        where = width, count * width, 3, 140, 1, 0, 0, 0
        module.attend_rows(0, 1, isa, *at, 0, *stored, size * groups, groups, width, *where, 0.0, 0.2)
        results += [out, keys, values]
    return [result.float() for result in results]
