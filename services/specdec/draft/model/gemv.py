"""Triton kernels for passes of a few tokens: the matrix products, each fused with what stands before and after it.

Such a pass is bound by the bytes of its weights. So every program holds a tile of whole rows of a matrix in registers,
all loads of it in flight at once, and multiplies the tokens' inputs with it one after the other. Where the device can
(Hopper on), a kernel is launched while the one before it still runs, and loads its weights before it waits for that
one's result: the memory is busy across the border.

Sums are in float32, in an order that does not depend on what else runs: the same input gives the same output.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.draft.model.kernels import early

MOST_TOKENS = 2  # on an H200 a step of two takes 0.82 ms, with cuBLAS 1.06; with more tokens arithmetic is the bound


def tile(n: int, k: int, itemsize: int, matrices: int = 1) -> tuple[int, int, int]:
    """(rows of a tile, its width, warps) for a matrix [n, k], or several of which each program has a tile.

    Found by trying, on an H200, on the whole step of a model with 1 billion parameters.
    """
    width = triton.next_power_of_2(k)
    if width > 4096:  # the inputs are many as well: for more rows they are read less often
        elements, warps = 32768, 16
    elif n * k < 2**24:
        elements, warps = 4096, 2
    elif n < 2**15:
        elements, warps = 16384 // itemsize, 4
    else:  # a vocabulary: of few blocks the best is found soon
        elements, warps = 32768, 16
    return max(1, min(32, elements // width // matrices)), width, warps


@triton.jit
def _tile(weight, row, n, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # -> [ROWS, WIDTH]
    """Rows from `row` on of a matrix of n."""
    rows, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = weight + row.to(tl.int64) * K + rows[:, None] * K + at[None]
    return tl.load(places, mask=(row + rows < n)[:, None] & (at < K)[None], other=0.0, eviction_policy="evict_first")


@triton.jit
def _gain(norm, K: tl.constexpr, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr):  # -> [WIDTH]
    """The weights of the norm before the matrix, which no kernel writes: loaded before the wait."""
    at = tl.arange(0, WIDTH)
    if HAS_NORM:
        return tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
    return tl.full((WIDTH,), 1.0, tl.float32)


@triton.jit
def _sums(parts, COUNT: tl.constexpr, AXIS: tl.constexpr):
    """The sums over an axis of one, two or four tensors, in one exchange between the warps."""
    if COUNT == 1:
        return (tl.sum(parts[0], AXIS),)
    elif COUNT == 2:
        return tl.split(tl.sum(tl.join(parts[0], parts[1]), AXIS))
    else:
        tl.static_assert(COUNT == 4)
        pairs = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
        first, second = tl.split(tl.sum(pairs, AXIS))
        return tl.split(first) + tl.split(second)


@triton.jit
def _inputs(x, gain, eps, TOKENS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr):
    """Every token's input with the norm's weights [WIDTH], and its norm's factor, for the product.

    All are loaded before any is used: one after the other, each token would cost a trip to the cache.
    """
    at = tl.arange(0, WIDTH)
    values = ()
    for token in tl.static_range(TOKENS):
        values = values + (tl.load(x + token * K + at, mask=at < K, other=0.0).to(tl.float32),)
    scaled, factors = (), ()
    if HAS_NORM:
        squares = ()
        for token in tl.static_range(TOKENS):
            squares = squares + (values[token] * values[token],)
        sums = _sums(squares, TOKENS, 0)
        for token in tl.static_range(TOKENS):
            scaled = scaled + (values[token] * gain,)
            factors = factors + (tl.rsqrt(sums[token] / K + eps),)
    else:
        scaled = values
    return scaled, factors


@triton.jit
def _project(
    x, norm, weight, scale, bias, out, n, eps,
    TOKENS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, ONTO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    inside = rows < n
    weights, gain = _tile(weight, row, n, K, ROWS, WIDTH), _gain(norm, K, WIDTH, HAS_NORM)
    if SCALED:
        scales = tl.load(scale + rows, mask=inside, other=0.0)
    if HAS_BIAS:
        biases = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    inputs, factors = _inputs(x, gain, eps, TOKENS, K, WIDTH, HAS_NORM)
    wide = weights.to(tl.float32)
    before, products = (), ()
    for token in tl.static_range(TOKENS):
        if ONTO:
            before = before + (tl.load(out + token * n + rows, mask=inside, other=0.0).to(tl.float32),)
        products = products + (wide * inputs[token][None],)
    sums = _sums(products, TOKENS, 1)
    for token in tl.static_range(TOKENS):
        total = sums[token]
        if HAS_NORM:
            total *= factors[token]
        if SCALED:
            total *= scales
        if HAS_BIAS:
            total += biases
        if ONTO:
            total += before[token]
        tl.store(out + token * n + rows, total, mask=inside)


def project(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    onto: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [T, k] -> [T, n]
    """The linear map of x, or of its norm; added in place to `onto` [T, n] if that is given, and that returned.

    weight [n, k], scale [n] of a weight in float8, bias [n]; `dtype` of what is returned, if not x's.
    """
    (tokens, k), n = x.shape, len(weight)
    out = torch.empty((tokens, n), dtype=dtype or x.dtype, device=x.device) if onto is None else onto
    rows, width, warps = tile(n, k, weight.itemsize)
    _project[(triton.cdiv(n, rows),)](
        x, x if norm is None else norm, weight, x if scale is None else scale, x if bias is None else bias, out,
        n, eps, tokens, k, rows, width, norm is not None, scale is not None, bias is not None, onto is not None,
        num_warps=warps, **early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _gate_up(
    x, norm, weight, scale, out, n, eps,
    TOKENS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    gates, gain = _tile(weight, row, n, K, ROWS, WIDTH), _gain(norm, K, WIDTH, True)
    ups = _tile(weight, n + row, 2 * n, K, ROWS, WIDTH)
    if SCALED:
        gate_scales = tl.load(scale + rows, mask=rows < n, other=0.0)
        up_scales = tl.load(scale + n + rows, mask=rows < n, other=0.0)
    if PDL:
        gdc_wait()
    inputs, factors = _inputs(x, gain, eps, TOKENS, K, WIDTH, True)
    wide_gates, wide_ups = gates.to(tl.float32), ups.to(tl.float32)
    products = ()
    for token in tl.static_range(TOKENS):
        products = products + (wide_gates * inputs[token][None], wide_ups * inputs[token][None])
    sums = _sums(products, 2 * TOKENS, 1)
    for token in tl.static_range(TOKENS):
        gate, up = sums[2 * token] * factors[token], sums[2 * token + 1] * factors[token]
        if SCALED:
            gate *= gate_scales
            up *= up_scales
        tl.store(out + token * n + rows, gate * tl.sigmoid(gate) * up, mask=rows < n)


def gate_up(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:  # [T, k] -> [T, n]
    """silu(gate) * up of x's norm. weight [2n, k]: the gates' rows, then the ups'."""
    (tokens, k), n = x.shape, len(weight) // 2
    out = x.new_empty((tokens, n))
    rows, width, warps = tile(2 * n, k, weight.itemsize, 2)
    _gate_up[(triton.cdiv(n, rows),)](
        x, norm, weight, x if scale is None else scale, out, n, eps,
        tokens, k, rows, width, scale is not None, num_warps=warps, **early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _qkv(
    x, norm, weight, scale, bias, frequencies, turn, positions, cells, q_out, keys, values, eps,
    TOKENS: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    half: tl.constexpr = SIZE // 2
    n: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    head = tl.program_id(0) // (half // ROWS)
    part = tl.program_id(0) % (half // ROWS) * ROWS  # of the head's lower half, which turns against the upper one
    row = head * SIZE + part
    rows = tl.arange(0, ROWS)
    lows, highs = _tile(weight, row, n, K, ROWS, WIDTH), _tile(weight, row + half, n, K, ROWS, WIDTH)
    gain = _gain(norm, K, WIDTH, HAS_NORM)
    frequency = tl.load(frequencies + part + rows)
    if SCALED:
        low_scales, high_scales = tl.load(scale + row + rows), tl.load(scale + row + half + rows)
    if HAS_BIAS:
        low_biases, high_biases = tl.load(bias + row + rows), tl.load(bias + row + half + rows)
    if PDL:
        gdc_wait()
    inputs, factors = _inputs(x, gain, eps, TOKENS, K, WIDTH, HAS_NORM)
    wide_lows, wide_highs = lows.to(tl.float32), highs.to(tl.float32)
    products, places, angles = (), (), ()
    for token in tl.static_range(TOKENS):
        places = places + (tl.load(cells + token).to(tl.int64),)
        angles = angles + (tl.load(positions + token).to(tl.float32) * frequency,)
        products = products + (wide_lows * inputs[token][None], wide_highs * inputs[token][None])
    sums = _sums(products, 2 * TOKENS, 1)
    for token in tl.static_range(TOKENS):
        low, high = sums[2 * token], sums[2 * token + 1]
        if HAS_NORM:
            low *= factors[token]
            high *= factors[token]
        if SCALED:
            low *= low_scales
            high *= high_scales
        if HAS_BIAS:
            low += low_biases.to(tl.float32)
            high += high_biases.to(tl.float32)
        if head < HEADS + KV_HEADS:
            cos, sin = tl.cos(angles[token]) * turn, tl.sin(angles[token]) * turn
            low, high = low * cos - high * sin, high * cos + low * sin
        if head < HEADS:
            end = q_out + (token * HEADS + head) * SIZE
        elif head < HEADS + KV_HEADS:
            end = keys + (places[token] * KV_HEADS + head - HEADS) * SIZE
        else:
            end = values + (places[token] * KV_HEADS + head - HEADS - KV_HEADS) * SIZE
        tl.store(end + part + rows, low)
        tl.store(end + half + part + rows, high)


def qkv(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    frequencies: torch.Tensor,
    factor: float,
    positions: torch.Tensor,
    cells: torch.Tensor,
    store: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # [T, k] -> q [T, heads, head_size]
    """Queries, keys and values of x, or of its norm, rotated; keys and values into their cells.

    weight [(heads + 2 kv_heads) * head_size, k], store [2, cells, kv_heads, head_size].
    """
    (tokens, k), (kv_heads, size) = x.shape, store.shape[2:]
    heads = len(weight) // size - 2 * kv_heads
    q = x.new_empty((tokens, heads, size))
    rows, width, warps = tile(len(weight), k, weight.itemsize, 2)
    rows = min(rows, size // 2)
    _qkv[(len(weight) // 2 // rows,)](
        x, x if norm is None else norm, weight, x if scale is None else scale, x if bias is None else bias,
        frequencies, factor, positions, cells, q, store[0], store[1], eps, tokens, k, heads, kv_heads, size,
        rows, width, norm is not None, scale is not None, bias is not None, num_warps=warps, **early(x.device),
    )  # fmt: skip
    return q


@triton.jit
def _head(
    x, weight, scale, best, ids, n,
    TOKENS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = block * ROWS
    rows = row + tl.arange(0, ROWS)
    weights = _tile(weight, row, n, K, ROWS, WIDTH)
    if SCALED:
        scales = tl.load(scale + rows, mask=rows < n, other=0.0)
    if PDL:
        gdc_wait()
    inputs, _ = _inputs(x, x, 0.0, TOKENS, K, WIDTH, False)
    wide = weights.to(tl.float32)
    products = ()
    for token in tl.static_range(TOKENS):
        products = products + (wide * inputs[token][None],)
    sums = _sums(products, TOKENS, 1)
    for token in tl.static_range(TOKENS):
        logits = sums[token]
        if SCALED:
            logits *= scales
        highest, at = tl.max(tl.where(rows < n, logits, float("-inf")), 0, return_indices=True)
        tl.store(best + token * blocks + block, highest)
        tl.store(ids + token * blocks + block, row + at)


def head(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:  # [T, k] -> [T, blocks] twice
    """The highest logit of every block of the vocabulary (float32), and its id (int32); of equals the lowest id.

    weight [vocabulary, k].
    """
    (tokens, k), n = x.shape, len(weight)
    rows, width, warps = tile(n, k, weight.itemsize)
    blocks = triton.cdiv(n, rows)
    best = torch.empty((tokens, blocks), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, blocks), dtype=torch.int32, device=x.device)
    _head[(blocks,)](
        x, weight, x if scale is None else scale, best, ids, n, tokens, k, rows, width, scale is not None,
        num_warps=warps, **early(x.device),
    )  # fmt: skip
    return best, ids
