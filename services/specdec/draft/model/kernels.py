"""Triton kernels of a decoding step on CUDA: what lies between the matrix products, fused, and attention over runs.

Every kernel reads positions and cells on the device, so that a captured graph serves any sessions at any length. Sums
are in float32 whatever the model's type.

Where the device can (Hopper on), a kernel is launched while the one before it still runs (programmatic dependent
launch): it says at once that the next may come, and touches nothing that another kernel writes before its gdc_wait.
Every kernel waits, so whatever is older than the one before it has ended too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK_BYTES = 1 << 15  # of the keys that a loop iteration of attention reads, and as many of the values


def early(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that may start before the one ahead of it ends."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@triton.jit
def _add_norm(x, delta, weight, out, n, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
    _add_norm[(rows,)](
        x, x if delta is None else delta, weight, out, n, eps, delta is not None, block,
        num_warps=8, **early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _join(
    tokens, table, features, of_token, of_feature, out, n, eps,
    KEEP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < n
    weight = of_token if half == 0 else of_feature
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = features + row * n
    if half == 0:
        place = table + tl.load(tokens + row) * n
    wide = tl.load(place + at, mask=inside, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / n + eps) * gain
    tl.store(out + (2 * row + half) * n + at, wide, mask=inside)
    if KEEP and half == 1:
        tl.store(features + row * n + at, wide, mask=inside)


def join(
    tokens: torch.Tensor,
    table: torch.Tensor,
    features: torch.Tensor,
    of_token: torch.Tensor,
    of_feature: torch.Tensor,
    eps: float,
    keep: bool,
) -> torch.Tensor:  # [T], [vocab, n], [T, n] -> [T, 2n]
    """The norms of each token's row of `table` and of its feature. With `keep` the latter replaces the feature too."""
    rows, n = features.shape
    out = features.new_empty((rows, 2 * n))
    _join[(rows, 2)](
        tokens, table, features, of_token, of_feature, out, n, eps, keep, triton.next_power_of_2(n),
        num_warps=8, **early(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _gate(gate_up, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
    _gate[(rows, triton.cdiv(n, 1024))](gate_up, out, n, 1024, **early(out.device))
    return out


@triton.jit
def _rope_store(
    qkv, frequencies, factor, positions, cells, q_norm, k_norm, q_out, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
        heads, kv_heads, size, norms is not None, num_warps=1, **early(q.device),
    )  # fmt: skip
    return q


@triton.jit
def _share(length, splits, BLOCK: tl.constexpr):
    """Keys a split has: whole blocks. The last splits of a short text have none."""
    return tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK


@triton.jit
def _attend_split(
    q, keys, values, positions, firsts, partial, sums, scale, splits,
    TOGETHER: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, kv_head, split = tl.program_id(0) * TOGETHER, tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    length = (tl.load(positions + token + TOGETHER - 1) + 1).to(tl.int32)
    first = tl.load(firsts + token).to(tl.int64)
    share = _share(length, splits, BLOCK)
    begin = split * share
    if begin < length:
        end = tl.minimum(begin + share, length)
        which, at = tl.arange(0, GROUP), tl.arange(0, SIZE)
        mine = which < group * TOGETHER
        own = tl.load(positions + token + which // group, mask=mine, other=0).to(tl.int32)
        rows = (token + which // group) * HEADS + kv_head * group + which % group
        query = tl.load(q + rows[:, None] * SIZE + at[None], mask=mine[:, None], other=0.0)
        best = tl.full((GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        mixed = tl.zeros((GROUP, SIZE), tl.float32)
        for block in range(begin, end, BLOCK):
            places = block + tl.arange(0, BLOCK)
            there = places < end
            offsets = ((first + places) * KV_HEADS + kv_head)[:, None] * SIZE + at[None]
            key = tl.load(keys + offsets, mask=there[:, None], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(places[None] <= own[:, None], scores, float("-inf"))
            newest = tl.maximum(best, tl.max(scores, 1))
            finite = tl.where(newest > float("-inf"), newest, 0.0)  # a token's run may end before the split does
            weights = tl.exp(scores - finite[:, None])
            fade = tl.exp(best - finite)
            value = tl.load(values + offsets, mask=there[:, None], other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            total = total * fade + tl.sum(weights, 1)
            best = newest
        place = rows * splits + split
        tl.store(sums + place, tl.where(total > 0, best + tl.log(total), float("-inf")), mask=mine)
        mixed = tl.where(total[:, None] > 0, mixed / total[:, None], 0.0)
        tl.store(partial + place[:, None] * SIZE + at[None], mixed, mask=mine[:, None])


@triton.jit
def _attend_merge(
    partial, sums, positions, out,
    TOGETHER: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    last = row // HEADS // TOGETHER * TOGETHER + TOGETHER - 1
    length = (tl.load(positions + last) + 1).to(tl.int32)
    splits, at = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    there = splits * _share(length, SPLITS, BLOCK) < length
    logs = tl.load(sums + row * SPLITS + splits, mask=there, other=float("-inf"))
    weights = tl.exp(logs - tl.max(logs, 0))
    weights /= tl.sum(weights, 0)
    parts = tl.load(partial + (row * SPLITS + splits)[:, None] * SIZE + at[None], mask=there[:, None], other=0.0)
    tl.store(out + row * SIZE + at, tl.sum(parts * weights[:, None], 0))


def splits_for(runs: int, kv_heads: int) -> int:
    """Parts a run's keys are cut into, so that few runs still fill the device."""
    return max(2, min(64, triton.next_power_of_2(triton.cdiv(1024, runs * kv_heads))))


def attend(
    q: torch.Tensor, store: torch.Tensor, positions: torch.Tensor, firsts: torch.Tensor, together: int = 1
) -> torch.Tensor:  # [T, heads, head_size] -> [T, heads * head_size]
    """Attention of every token over its run's cells up to its own position, keys cut in parts (flash decoding).

    store [2, cells, kv_heads, head_size], positions and firsts [T] on the device. Each `together` tokens are of one
    run, positions ascending: its keys are read once for them.
    """
    tokens, heads, size = q.shape
    kv_heads, runs = store.shape[2], tokens // together
    splits = splits_for(runs, kv_heads)
    partial = torch.empty((tokens, heads, splits, size), dtype=torch.float32, device=q.device)
    sums = torch.empty((tokens, heads, splits), dtype=torch.float32, device=q.device)
    block = min(128, BLOCK_BYTES // (size * store.itemsize))
    group = max(16, triton.next_power_of_2(heads // kv_heads * together))
    _attend_split[(runs, kv_heads, splits)](
        q, store[0], store[1], positions, firsts, partial, sums, size**-0.5, splits,
        together, heads, kv_heads, size, group, block, num_stages=2, **early(q.device),
    )  # fmt: skip
    out = q.new_empty((tokens, heads * size))
    _attend_merge[(tokens * heads,)](
        partial, sums, positions, out, together, heads, size, splits, block, **early(q.device)
    )
    return out


@triton.jit
def _maxima(logits, best, ids, n, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, BLOCK)
    inside = block * BLOCK + at < n
    values = tl.load(logits + row * n + block * BLOCK + at, mask=inside, other=float("-inf")).to(tl.float32)
    place = (row * blocks + block) * RANKS
    for rank in tl.static_range(RANKS):
        highest, where = tl.max(values, 0, return_indices=True)
        tl.store(best + place + rank, highest)
        tl.store(ids + place + rank, block * BLOCK + where)
        values = tl.where(at == where, float("-inf"), values)


def maxima(logits: torch.Tensor, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:  # [T, n] -> [T, candidates] x 2
    """The `ranks` highest logits of every block (float32) and their ids (int32); of equals the lowest id first."""
    rows, n = logits.shape
    blocks = triton.cdiv(n, 2048)
    best = torch.empty((rows, blocks * ranks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, blocks * ranks), dtype=torch.int32, device=logits.device)
    _maxima[(rows, blocks)](logits, best, ids, n, ranks, 2048, **early(logits.device))
    return best, ids


@triton.jit
def _advance(
    best, ids, offsets, tokens, made, positions, steps, candidates, columns,
    RANKS: tl.constexpr, HAS_OFFSETS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(best + row * candidates + at, mask=at < candidates, other=float("-inf"))
    step = tl.load(steps + row)
    for rank in tl.static_range(RANKS):
        _, where = tl.max(values, 0, return_indices=True)
        token = tl.load(ids + row * candidates + tl.minimum(where, candidates - 1)).to(tl.int64)
        if HAS_OFFSETS:
            token += tl.load(offsets + token)
        if rank == 0:
            tl.store(tokens + row, token)
        tl.store(made + (step * RANKS + rank) * columns + row, token)
        values = tl.where(at == where, float("-inf"), values)
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(steps + row, step + 1)


def advance(
    best: torch.Tensor,
    ids: torch.Tensor,
    tokens: torch.Tensor,
    made: torch.Tensor,
    positions: torch.Tensor,
    steps: torch.Tensor,
    offsets: torch.Tensor | None = None,
) -> None:
    """Ends a step: each row's likeliest tokens into made[steps[row], :, row]; its position and step grow.

    The likeliest of all also into tokens[row], to be fed next. best and ids [rows, candidates] of `maxima` or
    gemv.head, made [most steps, ranks, columns]; the others int64, one a row. offsets [n] int64: what is added to an
    id to make it the target's, for a draft vocabulary of its own.
    """
    rows, candidates = best.shape
    _, ranks, columns = made.shape
    _advance[(rows,)](
        best, ids, ids if offsets is None else offsets, tokens, made, positions, steps, candidates, columns,
        ranks, offsets is not None, triton.next_power_of_2(candidates), num_warps=16, **early(best.device),
    )  # fmt: skip
