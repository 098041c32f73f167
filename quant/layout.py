"""4-bit matrices: their meaning, and the GPTQ tensor layout in which they are stored.

Knows no models, no quantisers and no kernels. What a kernel needs is repacked from here at load time and never stored.
The layout is AutoGPTQ's: eight nibbles along the input in one int32, lowest nibble first. "v1" files store each zero
minus one, "v2" files ("gptq_v2") as it is; both are read, v1 is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import FormatError, UnsupportedError

NIBBLES = 8  # 4-bit codes in one int32
GROUP_SIZES = (32, 64, 128, -1)  # what the quantisers write; -1 is one group per row
_ONES = 0x11111111
_SCALE_MIN = 2.0**-20  # exact in bf16 and, as a subnormal, in fp16
_SCALE_MAX = 65280.0  # the largest bf16 number that fp16 holds


@dataclass(frozen=True)
class Int4Matrix:
    """W[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g], with g = k // group_size, or g_idx[k] where that is given.

    codes: uint8 [N, K], 0..15. scales: float32 [N, G]. zeros: uint8 [N, G] (integer zeros, 1..15 in what this package
    writes) or float32 [N, G] (HQQ). g_idx: int32 [K], only for act-order files whose groups are not consecutive.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    g_idx: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs, inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def float_zeros(self) -> bool:
        """Whether the zeros are real numbers, which the GPTQ layout proper cannot hold."""
        return self.zeros.dtype.is_floating_point

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight: codes, scales and zeros (the one g_idx per matrix is not counted)."""
        return 4 + (16 + (16 if self.float_zeros else 4)) / self.group_size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [N, K], computed in float32 and rounded to `dtype` at the end."""
        N, K = self.shape
        zeros = self.zeros.float()
        if self.g_idx is not None:
            groups = self.g_idx.long()
            weight = self.codes.float().sub_(zeros[:, groups]).mul_(self.scales[:, groups])
        else:
            weight = self.codes.view(N, -1, self.group_size).float()
            weight = weight.sub_(zeros.unsqueeze(-1)).mul_(self.scales.unsqueeze(-1)).view(N, K)
        return weight.to(dtype)


def round_scale(scale: Tensor) -> Tensor:
    """The nearest positive scale (float32) that bf16 and fp16 both hold exactly, so that file and kernels agree.

    Never 0: a group of equal weights would otherwise give 0/0.
    """
    # bf16 keeps 8 significant bits and fp16 11, or fewer below 2^-14, where rounding again only removes bits.
    rounded = scale.float().clamp(_SCALE_MIN, _SCALE_MAX).bfloat16().float()
    return rounded.half().float()


def round_zero(zero: Tensor) -> Tensor:
    """The nearest float zero (float32) that bf16 and fp16 both hold exactly."""
    return zero.float().clamp(-_SCALE_MAX, _SCALE_MAX).bfloat16().half().float()


def resolve_group_size(K: int, group_size: int) -> int:
    """Inputs per group: `group_size`, or K where it is -1. ValueError where K is not a multiple."""
    size = K if group_size == -1 else group_size
    if size <= 0 or K % size:
        raise ValueError(f"{K} inputs cannot be cut into groups of {group_size}")
    return size


def choose_group_size(K: int, preferred: int) -> int:
    """`preferred` where it divides K, else the largest smaller of 32, 64, 128 that does; ValueError where none does."""
    if preferred == -1:
        return -1
    for size in (preferred, *sorted(GROUP_SIZES, reverse=True)):
        if 0 < size <= preferred and K % size == 0:
            return size
    raise ValueError(f"no group size up to {preferred} divides {K} inputs")


def packed_shapes(
    N: int, K: int, group_size: int, float_zeros: bool = False
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, shape) of the tensors that `pack` gives for a matrix [N, K].

    Raises ValueError where the layout cannot hold the shape.
    """
    size = resolve_group_size(K, group_size)
    if N % NIBBLES or K % NIBBLES:
        raise ValueError(f"a [{N}, {K}] matrix does not fit: the layout needs multiples of {NIBBLES}")
    G = K // size
    zeros = {"zeros": (torch.float16, (G, N))} if float_zeros else {"qzeros": (torch.int32, (G, N // NIBBLES))}
    return {
        "qweight": (torch.int32, (K // NIBBLES, N)),
        **zeros,
        "scales": (torch.float16, (G, N)),
        "g_idx": (torch.int32, (K,)),
    }


def pack(matrix: Int4Matrix) -> dict[str, Tensor]:
    """The matrix as GPTQ v1 tensors: qweight, qzeros (zeros for float zeros), scales, g_idx.

    Raises ValueError where the shape does not fit, a zero is outside 1..15, or fp16 would round a scale or a zero.
    """
    N, K = matrix.shape
    packed_shapes(N, K, matrix.group_size, matrix.float_zeros)
    g_idx = trivial_g_idx(K, matrix.group_size) if matrix.g_idx is None else matrix.g_idx
    if matrix.float_zeros:
        zeros = {"zeros": _exact_half(matrix.zeros, "zero").t().contiguous()}
    else:
        if int(matrix.zeros.min()) < 1 or int(matrix.zeros.max()) > 15:
            raise ValueError("the v1 layout stores zero - 1 in four bits: zeros must be 1 to 15")
        zeros = {"qzeros": _pack_nibbles(matrix.zeros.t().contiguous() - 1)}
    return {
        "qweight": _pack_nibbles(matrix.codes).t().contiguous(),
        **zeros,
        "scales": _exact_half(matrix.scales, "scale").t().contiguous(),
        "g_idx": g_idx.to(torch.int32).cpu(),
    }


def unpack(
    tensors: Mapping[str, Tensor], *, symmetric: bool | None = None, checkpoint_format: str | None = None
) -> Int4Matrix:
    """The matrix that GPTQ tensors hold; `symmetric` and `checkpoint_format` are what the file's config says.

    Symmetric files are told apart by the stored zero (7: v1, 8: v2), since their labels are often wrong; others by the
    label, v1 where there is none. Raises FormatError where tensors do not fit together, UnsupportedError for a label
    other than gptq and gptq_v2, ValueError where the groups do not divide the inputs.
    """
    qweight, scales = tensors["qweight"], tensors["scales"]
    K, N, G = qweight.shape[0] * NIBBLES, qweight.shape[1], scales.shape[0]
    if K % G:
        raise ValueError(f"qweight {tuple(qweight.shape)} holds {K} inputs, which {G} groups of scales do not divide")
    group_size = K // G
    float_zeros = "zeros" in tensors
    _check_shapes(tensors, packed_shapes(N, K, group_size, float_zeros))
    if float_zeros:
        zeros = tensors["zeros"].t().float().contiguous()
    else:
        zeros = read_zeros(tensors["qzeros"], symmetric, checkpoint_format)
    codes = _unpack_nibbles(qweight.t().contiguous())
    return Int4Matrix(codes, scales.t().float().contiguous(), zeros, group_size, _read_g_idx(tensors, K, G))


def trivial_g_idx(K: int, group_size: int) -> Tensor:
    """int32 [K]: consecutive groups of `group_size` inputs."""
    return torch.arange(K, dtype=torch.int32) // group_size


def pack_pairs(codes: Tensor) -> Tensor:
    """Two codes to a byte: [..., 2 n] of uint8 0..15 -> [..., n] of uint8, the first in the low nibble."""
    pairs = _reinterpret(codes, torch.int16)  # little-endian, as safetensors is
    return (pairs | (pairs >> 4)).bitwise_and_(0xFF).to(torch.uint8)


def unpack_pairs(packed: Tensor) -> Tensor:
    """The inverse of `pack_pairs`."""
    pairs = packed.to(torch.int16)
    return _reinterpret((pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F), torch.uint8)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """[..., 8 n] of uint8 0..15 -> [..., n] of int32, lowest nibble first."""
    return _reinterpret(pack_pairs(codes), torch.int32)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] of int32 -> [..., 8 n] of uint8 0..15."""
    return unpack_pairs(_reinterpret(packed, torch.uint8))


def _reinterpret(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as `dtype`, the last dimension resized to match."""
    # Flat first: a transposed [1, n] counts as contiguous, and keeps strides that `view` refuses.
    return values.contiguous().flatten().view(dtype).view(*values.shape[:-1], -1)


def _exact_half(values: Tensor, what: str) -> Tensor:
    half = values.half()
    if not torch.equal(half.float(), values.float()):
        raise ValueError(f"a {what} is not exact in fp16: round it first (round_scale, round_zero)")
    return half


def _check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    for name, (_, shape) in expected.items():
        found = tensors.get(name)
        if found is None:
            if name == "g_idx":
                continue
            raise FormatError(f"a 4-bit matrix lacks {name}")
        if tuple(found.shape) != shape:
            raise FormatError(f"{name} has shape {tuple(found.shape)}, but its qweight and scales ask for {shape}")


def read_zeros(qzeros: Tensor, symmetric: bool | None, checkpoint_format: str | None) -> Tensor:
    """The zeros uint8 [N, G] of a packed matrix; see `unpack` for how v1 and v2 are told apart."""
    label = checkpoint_format or "gptq"
    if label not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"checkpoint format {label!r} is not read", "Formats read: gptq, gptq_v2")
    stored_minus_one = label == "gptq"
    if symmetric is not False:
        first = int(qzeros.reshape(-1)[0]) & 0xFFFFFFFF
        if first in (7 * _ONES, 8 * _ONES) and bool((qzeros == qzeros.reshape(-1)[0]).all()):
            stored_minus_one = first == 7 * _ONES
    # One addition over the eight nibbles, as GPTQModel reads it: its writer subtracts the same way, so a zero of 0
    # borrows from the next nibble and comes back whole.
    plain = qzeros.to(torch.int32) + _ONES if stored_minus_one else qzeros
    return _unpack_nibbles(plain).t().contiguous()


def _read_g_idx(tensors: Mapping[str, Tensor], K: int, G: int) -> Tensor | None:
    g_idx = tensors.get("g_idx")
    if g_idx is None or torch.equal(g_idx.to(torch.int32), trivial_g_idx(K, K // G).to(g_idx.device)):
        return None
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= G:
        raise FormatError(f"g_idx points outside the {G} groups of its matrix")
    return g_idx.to(torch.int32)
