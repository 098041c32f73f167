"""Triton kernels of the products: dense and 4-bit weights times few rows, and one kernel that does either by a flag.

Imported only where a CUDA device is used, or by a test that interprets the kernels. Knows no models; which sizes are
launched is said by `products`. Every load is masked, so any N, K and group size is right. Bounds of loops are
constants: the compiler makes one kernel for each shape of a model, and the interpreter (of Triton 3.6, beside
NumPy 2.4) takes no others.

4-bit weights lie in planes (`quant.planes`): nibble j of word w of a row is its input
`128 (w // 16) + 16 j + w % 16`. Sixteen neighbours of a plane are sixteen neighbouring inputs, so that reading x is
contiguous; and a run of planes shares a group where the group size is a multiple of 16.
"""

# ruff: noqa: PLR0917 - Triton's kernels take their arguments in order
# static_range is iterated by Triton's compiler alone:
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

# Rows of x: one is multiplied element by element, more go through the tensor cores, padded to sixteen.


@triton.jit
def _load_input(x: tl.tensor, order: tl.tensor, k: tl.tensor, K: tl.constexpr, HAS_ORDER: tl.constexpr):  # noqa: ANN202 - jit
    """x[k] of one row as float32; through `order` where the 4-bit matrix has its inputs sorted by group."""
    inside = k < K
    if HAS_ORDER:
        k = tl.load(order + k, mask=inside, other=0)
    return tl.load(x + k, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_inputs(  # noqa: ANN202 - jit
    x: tl.tensor, order: tl.tensor, m: tl.tensor, k: tl.tensor, M: int, K: tl.constexpr, HAS_ORDER: tl.constexpr
):
    """x[m, k] of several rows in its own dtype."""
    inside = k < K
    source = k
    if HAS_ORDER:
        source = tl.load(order + k, mask=inside, other=0)
    return tl.load(x + m[:, None] * K + source[None, :], mask=(m < M)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _load_words(words: tl.tensor, n: tl.tensor, w: tl.tensor, N: int, W: tl.constexpr):  # noqa: ANN202 - jit
    """Words w of rows n: eight codes each."""
    inside = (n < N)[:, None] & (w < W)[None, :]
    return tl.load(words + n.to(tl.int64)[:, None] * W + w[None, :], mask=inside, other=0)


@triton.jit
def _load_of_group(  # noqa: ANN202 - jit
    values: tl.tensor, n: tl.tensor, k: tl.tensor, N: int, K: tl.constexpr, group: tl.constexpr
):
    """Scales or zeros [G, N] of rows n, for the groups of inputs k: float32 [n, k]."""
    inside = (n < N)[:, None] & (k < K)[None, :]
    return tl.load(values + (k // group)[None, :] * N + n[:, None], mask=inside, other=0).to(tl.float32)


@triton.jit
def _int4_row(  # noqa: ANN202 - jit
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    order: tl.tensor,
    n: tl.tensor,
    N: int,
    K: tl.constexpr,
    W: tl.constexpr,
    group: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row of x times rows n of the weight: float32 [BLOCK_N]. The zero leaves the sum as z * sum(x)."""
    acc = tl.zeros([BLOCK_N, WORDS], tl.float32)
    for start in tl.range(0, W, WORDS, num_stages=STAGES):
        w = start + tl.arange(0, WORDS)
        packed = _load_words(words, n, w, N, W)
        first = w // 16 * 128 + w % 16
        for run in tl.static_range(0, 8, RUN):
            k = first + 16 * run
            scale = _load_of_group(scales, n, k, N, K, group)
            zero = _load_of_group(zeros, n, k, N, K, group)
            dotted = tl.zeros([BLOCK_N, WORDS], tl.float32)
            total = tl.zeros([WORDS], tl.float32)
            for plane in tl.static_range(0, RUN):
                value = _load_input(x, order, k + 16 * plane, K, HAS_ORDER)
                dotted += ((packed >> (4 * (run + plane))) & 15).to(tl.float32) * value[None, :]
                total += value
            acc += scale * (dotted - zero * total[None, :])
    return tl.sum(acc, 1)


@triton.jit
def _int4_rows(  # noqa: ANN202 - jit
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    order: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    M: int,
    N: int,
    K: tl.constexpr,
    W: tl.constexpr,
    group: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows m of x times rows n of the weight: float32 [ROWS, BLOCK_N]. Weights are rounded to the dtype of x."""
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(0, W, WORDS, num_stages=STAGES):
        w = start + tl.arange(0, WORDS)
        packed = _load_words(words, n, w, N, W)
        first = w // 16 * 128 + w % 16
        for run in tl.static_range(0, 8, RUN):
            k = first + 16 * run
            scale = _load_of_group(scales, n, k, N, K, group)
            zero = _load_of_group(zeros, n, k, N, K, group)
            for plane in tl.static_range(0, RUN):
                value = _load_inputs(x, order, m, k + 16 * plane, M, K, HAS_ORDER)
                code = ((packed >> (4 * (run + plane))) & 15).to(tl.float32)
                weight = ((code - zero) * scale).to(value.dtype)
                acc = tl.dot(value, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit
def _dense_row(  # noqa: ANN202 - jit
    x: tl.tensor,
    weight: tl.tensor,
    n: tl.tensor,
    N: int,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row of x times rows n of a dense weight [N, K]: float32 [BLOCK_N]."""
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = (n < N)[:, None] & (k < K)[None, :]
        tile = tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
        acc += tile.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _dense_rows(  # noqa: ANN202 - jit
    x: tl.tensor,
    weight: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    M: int,
    N: int,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows m of x times rows n of a dense weight: float32 [ROWS, BLOCK_N]."""
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = (n < N)[:, None] & (k < K)[None, :]
        tile = tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
        value = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(value, tl.trans(tile), acc, input_precision="ieee")
    return acc


@triton.jit
def flagged(
    flag: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    order: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    M: int,
    N: int,
    K: tl.constexpr,
    W: tl.constexpr,
    group: tl.constexpr,
    stride: int,
    BOTH: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """out[m, n] (rows `stride` apart) = x[m] . W[n] + bias[n]: W is dense where the flag is 0, 4-bit otherwise.

    Without BOTH there is no dense weight, and the flag is not read.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if ROWS == 1:
        if BOTH:
            if tl.load(flag) == 0:
                acc = _dense_row(x, weight, n, N, K, BLOCK_N, BLOCK_K, STAGES)
            else:
                acc = _int4_row(
                    x, words, scales, zeros, order, n, N, K, W, group, BLOCK_N, WORDS, RUN, HAS_ORDER, STAGES
                )
        else:
            acc = _int4_row(x, words, scales, zeros, order, n, N, K, W, group, BLOCK_N, WORDS, RUN, HAS_ORDER, STAGES)
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out + n, acc.to(out.dtype.element_ty), mask=n < N)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        m = tl.arange(0, ROWS)
        if BOTH:
            if tl.load(flag) == 0:
                sums = _dense_rows(x, weight, m, n, M, N, K, ROWS, BLOCK_N, BLOCK_K, STAGES)
            else:
                sums = _int4_rows(
                    x,
                    words,
                    scales,
                    zeros,
                    order,
                    m,
                    n,
                    M,
                    N,
                    K,
                    W,
                    group,
                    ROWS,
                    BLOCK_N,
                    WORDS,
                    RUN,
                    HAS_ORDER,
                    STAGES,
                )
        else:
            sums = _int4_rows(
                x, words, scales, zeros, order, m, n, M, N, K, W, group, ROWS, BLOCK_N, WORDS, RUN, HAS_ORDER, STAGES
            )
        if HAS_BIAS:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
        tl.store(
            out + m[:, None] * stride + n[None, :],
            sums.to(out.dtype.element_ty),  # pyright: ignore[reportAttributeAccessIssue]
            mask=inside,
        )


@triton.jit
def exit_rule(
    before: tl.tensor,
    after: tl.tensor,
    thresholds: tl.tensor,
    position: tl.tensor,
    flag: tl.tensor,
    depth: tl.tensor,
    layer: int,
    held: int,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """River eq. (1) for one token: raise the flag where cos(before, after) > thresholds[layer - 1]; count the depth.

    Positions below `held` never raise it. One program; the depth grows where the token runs the next block too.
    """
    dot = tl.zeros([BLOCK], tl.float32)
    left = tl.zeros([BLOCK], tl.float32)
    right = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(before + at, mask=at < D, other=0.0).to(tl.float32)
        b = tl.load(after + at, mask=at < D, other=0.0).to(tl.float32)
        dot += a * b
        left += a * a
        right += b * b
    # As torch.cosine_similarity: each norm is at least 1e-8.
    norms = tl.maximum(tl.sqrt(tl.sum(left, 0)), 1e-8) * tl.maximum(tl.sqrt(tl.sum(right, 0)), 1e-8)
    leaves = (tl.sum(dot, 0) / norms > tl.load(thresholds + layer - 1)) & (tl.load(position) >= held)
    raised = tl.load(flag) | leaves.to(tl.int32)
    tl.store(flag, raised)
    tl.store(depth, tl.load(depth) + 1 - raised)
