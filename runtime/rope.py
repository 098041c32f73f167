"""Rotary position embedding: which angles a config asks for, and their cosines by position.

The inverse frequencies follow the rules of transformers' `modeling_rope_utils`. Knows no blocks and no cache.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, UnsupportedError

# What each kind needs besides its base; `None` in the config counts as absent.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class RopeSpec:
    """One rotation: its kind, its base, how many of a head's dimensions turn, and the scaling of its kind.

    `max_positions` is the config's `max_position_embeddings`, `original_max` the length trained before scaling.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    original_max: int
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, Any], *, theta: float, rotary_dim: int, max_positions: int
    ) -> "RopeSpec":
        """Read `rope_parameters` (transformers 5) or `rope_scaling` (4); raise when unknown or incomplete."""
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in REQUIRED:
            raise UnsupportedError(f"RoPE scaling {kind!r} is not supported", f"Known: {', '.join(REQUIRED)}.")
        given = {key: value for key, value in parameters.items() if value is not None}
        for key in REQUIRED[kind]:
            if key not in given:
                raise FormatError(f"config.json asks for RoPE scaling {kind!r} without {key!r}", "Download it again.")
        names = {field.name for field in fields(cls)} - {"kind", "theta", "rotary_dim", "max_positions", "original_max"}
        scaling: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key in names
        }
        original = given.get("original_max_position_embeddings", max_positions)
        spec = cls(kind, float(given.get("rope_theta", theta)), rotary_dim, max_positions, original, **scaling)
        spec._check_factors()
        return spec

    def _check_factors(self) -> None:
        for name in ("short_factor", "long_factor"):
            given = getattr(self, name)
            if self.kind == "longrope" and len(given) != self.rotary_dim // 2:
                raise FormatError(
                    f"config.json has {len(given)} values in {name}, RoPE needs {self.rotary_dim // 2}",
                    "Download the model again.",
                )

    def regime(self, length: int) -> int:
        """Which set of frequencies serves a sequence of `length` positions; equal numbers mean equal angles.

        longrope switches once (0 short, 1 long). dynamic NTK has a set of its own for each length past the trained one.
        """
        if self.kind == "longrope":
            return int(length > self.original_max)
        if self.kind == "dynamic":
            return max(length, self.max_positions)
        return 0


def inverse_frequencies(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """Angles per position [rotary_dim / 2] in float32, and the factor on cosine and sine, at `length` positions."""
    return _RULES[spec.kind](spec, length)


def _powers(spec: RopeSpec, theta: float) -> Tensor:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / spec.rotary_dim
    return theta**exponents


def _default(spec: RopeSpec, length: int) -> tuple[Tensor, float]:  # noqa: ARG001 - one signature for all kinds
    return 1.0 / _powers(spec, spec.theta), 1.0


def _linear(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    return _default(spec, length)[0] / _factor(spec), 1.0


def _dynamic(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    factor, dim = _factor(spec), spec.rotary_dim
    stretch = factor * max(length, spec.max_positions) / spec.max_positions - (factor - 1)
    return 1.0 / _powers(spec, spec.theta * stretch ** (dim / (dim - 2))), 1.0


def _llama3(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    plain, factor = _default(spec, length)[0], _factor(spec)
    low, high, old = spec.low_freq_factor, spec.high_freq_factor, spec.original_max
    wavelength = 2 * math.pi / plain
    smooth = (old / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > old / low, plain / factor, blended)
    return torch.where(wavelength < old / high, plain, scaled), 1.0


def _yarn(spec: RopeSpec, length: int) -> tuple[Tensor, float]:  # noqa: ARG001 - one signature for all kinds
    """YaRN (arXiv 2309.00071), section 3.2: interpolate slow dimensions, keep fast ones, a ramp between."""
    factor, dim = _factor(spec), spec.rotary_dim

    def dimension(rotations: float) -> float:
        return dim * math.log(spec.original_max / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    plain = 1.0 / _powers(spec, spec.theta)
    slow = 1.0 / (factor * _powers(spec, spec.theta))
    return slow * interpolated + plain * (1 - interpolated), _yarn_attention(spec, factor)


def _yarn_attention(spec: RopeSpec, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


def _longrope(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): one divisor per dimension, a second set past the trained length."""
    divisors = torch.tensor(spec.long_factor if length > spec.original_max else spec.short_factor, dtype=torch.float32)
    factor = _factor(spec)
    attention = spec.attention_factor
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(spec.original_max))
    return 1.0 / (divisors * _powers(spec, spec.theta)), attention


def _factor(spec: RopeSpec) -> float:
    return spec.max_positions / spec.original_max if spec.factor is None else spec.factor


_RULES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def tabulate(spec: RopeSpec, positions: Tensor, length: int) -> Tensor:
    """Cosine and signed sine [2, n, rotary_dim] of `positions` [n] in a sequence of `length`, float32; see `Rotary`."""
    frequencies, scale = inverse_frequencies(spec, length)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))


class Rotary:
    """Cosines and signed sines of one RopeSpec by position, tabulated once and grown on demand.

    The sine's first half is negated, so that rotating is `x * cos + swap_halves(x) * sin`.
    """

    def __init__(self, spec: RopeSpec, *, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self._device = device
        self._dtype = dtype
        self._regime = -1
        self._table = torch.empty(0)

    def range(self, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [stop - start, rotary_dim] of consecutive positions in a sequence of `length`."""
        table = self.table(stop, length)
        cos, sin = table[:, start:stop].unbind(0)
        return cos, sin

    def rows(self, positions: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosine and sine [B, 1, S, rotary_dim] at `positions` [B, S] of rows of `lengths`."""
        if len({self.spec.regime(length) for length in lengths}) == 1:
            picked = self.table(max(*lengths, 1), max(lengths))[:, positions.to(self._device)]
        else:
            parts = [
                self.table(max(n, 1), n)[:, row.to(self._device)] for row, n in zip(positions, lengths, strict=True)
            ]
            picked = torch.stack(parts, dim=1)
        cos, sin = picked.unsqueeze(2).unbind(0)
        return cos, sin

    def table(self, stop: int, length: int) -> Tensor:
        """Cosine and sine [2, n, rotary_dim], contiguous, of at least `stop` positions in a sequence of `length`."""
        regime = self.spec.regime(length)
        if regime != self._regime or self._table.shape[1] < stop:
            spare = max(256, min(stop * 3 // 2, self.spec.max_positions))
            grown = stop if self.spec.kind == "dynamic" else max(stop, spare)
            self._table, self._regime = self._compute(grown, length), regime
        return self._table

    @torch.inference_mode(mode=False)  # the table is kept: a pass that trains may use it after one that did not
    def _compute(self, count: int, length: int) -> Tensor:
        return tabulate(self.spec, torch.arange(count), length).to(device=self._device, dtype=self._dtype)
