"""Triton kernels of a decoding step on CUDA: what lies between the matrix products, fused, and attention over runs.

Every kernel reads positions and cells on the device, so that a captured graph serves any sessions at any length. Sums
are in float32 whatever the model's type.
"""

import torch
import triton
import triton.language as tl

SPLIT_BLOCK = 64  # keys a loop iteration of attention reads


@triton.jit
def _add_norm(x, delta, weight, out, n, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * n + at, mask=inside, other=0.0)
    if HAS_DELTA:
        value += tl.load(delta + row * n + at, mask=inside, other=0.0)
        tl.store(x + row * n + at, value, mask=inside)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / n + eps)
    tl.store(out + row * n + at, wide * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32), mask=inside)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x += delta in place, and the norm of that. [T, n]"""
    out = torch.empty_like(x)
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    _add_norm[(rows,)](x, delta if delta is not None else x, weight, out, n, eps, delta is not None, block, num_warps=8)
    return out


@triton.jit
def _gate(gate_up, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(gate_up + row * 2 * n + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, gate * tl.sigmoid(gate) * up, mask=inside)


def gate(gate_up: torch.Tensor) -> torch.Tensor:  # [T, 2n] -> [T, n]
    """silu(gate) * up of the two halves."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, n))
    _gate[(rows, triton.cdiv(n, 1024))](gate_up, out, n, 1024)
    return out


@triton.jit
def _rope_store(
    qkv, frequencies, factor, positions, cells, q_norm, k_norm, q_out, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = SIZE // 2
    at = tl.arange(0, half)
    start = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * SIZE
    low, high = tl.load(start + at).to(tl.float32), tl.load(start + half + at).to(tl.float32)
    cell = tl.load(cells + token)
    if head < HEADS + KV_HEADS:
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / SIZE + eps)
            weight = q_norm if head < HEADS else k_norm
            low *= scale * tl.load(weight + at).to(tl.float32)
            high *= scale * tl.load(weight + half + at).to(tl.float32)
        angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at)
        cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
        low, high = low * cos - high * sin, high * cos + low * sin
    if head < HEADS:
        end = q_out + (token * HEADS + head) * SIZE
    elif head < HEADS + KV_HEADS:
        end = keys + (cell * KV_HEADS + head - HEADS) * SIZE
    else:
        end = values + (cell * KV_HEADS + head - HEADS - KV_HEADS) * SIZE
    tl.store(end + at, low)
    tl.store(end + half + at, high)


def rope_store(
    qkv: torch.Tensor,
    heads: int,
    frequencies: torch.Tensor,
    factor: float,
    positions: torch.Tensor,
    cells: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    store: torch.Tensor,
) -> torch.Tensor:  # -> q [T, heads, head_size]
    """Norms where the family has them, rotation, and keys and values into their cells.

    qkv [T, (heads + 2 kv_heads) * head_size], store [2, cells, kv_heads, head_size].
    """
    kv_heads, size = store.shape[2:]
    q = qkv.new_empty((len(qkv), heads, size))
    q_norm, k_norm = norms or (frequencies, frequencies)
    _rope_store[(len(qkv), heads + 2 * kv_heads)](
        qkv, frequencies, factor, positions, cells, q_norm, k_norm, q, store[0], store[1], eps,
        heads, kv_heads, size, norms is not None, num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _attend_split(
    q, keys, values, positions, firsts, partial, sums, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    length = (tl.load(positions + token) + 1).to(tl.int32)
    first = tl.load(firsts + token).to(tl.int64)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, length)
    heads, at = tl.arange(0, GROUP), tl.arange(0, SIZE)
    mine = heads < group
    rows = token * HEADS + kv_head * group + heads
    query = tl.load(q + rows[:, None] * SIZE + at[None], mask=mine[:, None], other=0.0)
    best = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, SIZE), tl.float32)
    for block in range(begin, end, BLOCK):
        places = block + tl.arange(0, BLOCK)
        there = places < end
        offsets = ((first + places) * KV_HEADS + kv_head)[:, None] * SIZE + at[None]
        key = tl.load(keys + offsets, mask=there[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key)) * scale
        scores = tl.where(there[None], scores, float("-inf"))
        newest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - newest[:, None])
        fade = tl.exp(best - newest)
        value = tl.load(values + offsets, mask=there[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * fade + tl.sum(weights, 1)
        best = newest
    place = rows * SPLITS + split
    tl.store(sums + place, tl.where(total > 0, best + tl.log(total), float("-inf")), mask=mine)
    mixed = tl.where(total[:, None] > 0, mixed / total[:, None], 0.0)
    tl.store(partial + place[:, None] * SIZE + at[None], mixed, mask=mine[:, None])


@triton.jit
def _attend_merge(partial, sums, out, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    splits, at = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    logs = tl.load(sums + row * SPLITS + splits)
    weights = tl.exp(logs - tl.max(logs, 0))
    weights /= tl.sum(weights, 0)
    parts = tl.load(partial + (row * SPLITS + splits)[:, None] * SIZE + at[None])
    tl.store(out + row * SIZE + at, tl.sum(parts * weights[:, None], 0))


def splits_for(rows: int, kv_heads: int) -> int:
    """Parts a row's keys are cut into, so that few rows still fill the device."""
    return max(2, min(64, triton.next_power_of_2(triton.cdiv(264, rows * kv_heads))))


def attend(
    q: torch.Tensor, store: torch.Tensor, positions: torch.Tensor, firsts: torch.Tensor
) -> torch.Tensor:  # [T, heads, head_size] -> [T, heads * head_size]
    """Attention of every token over its run's cells up to its own position, keys cut in parts (flash decoding).

    store [2, cells, kv_heads, head_size], positions and firsts [T] on the device.
    """
    tokens, heads, size = q.shape
    kv_heads = store.shape[2]
    splits = splits_for(tokens, kv_heads)
    partial = torch.empty((tokens, heads, splits, size), dtype=torch.float32, device=q.device)
    sums = torch.empty((tokens, heads, splits), dtype=torch.float32, device=q.device)
    _attend_split[(tokens, kv_heads, splits)](
        q, store[0], store[1], positions, firsts, partial, sums, size**-0.5,
        heads, kv_heads, size, splits, max(16, triton.next_power_of_2(heads // kv_heads)), SPLIT_BLOCK,
    )  # fmt: skip
    out = q.new_empty((tokens, heads * size))
    _attend_merge[(tokens * heads,)](partial, sums, out, size, splits)
    return out
