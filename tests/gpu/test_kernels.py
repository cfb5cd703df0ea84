"""draft/model/kernels.py and gemv.py against plain torch in float64, from the same inputs.

On a machine with a GPU: `pytest --confcutdir tests/gpu tests/gpu` (nothing but torch, transformers and pytest needed).
In Triton's interpreter, which has no bfloat16: `TRITON_INTERPRET=1 pytest --confcutdir tests/gpu tests/gpu -k float32`.
"""

import os
import statistics
import time

import pytest
import torch
import torch.nn.functional as F

from specdec.draft.model import eager, gemv, kernels
from specdec.draft.model.decoder import Linear, Pass, Span

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or Triton's interpreter"),
]
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def dtype(request):
    return request.param


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def near(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    """Within the rounding of the type: one of its steps at the values' own size."""
    step = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}[ours.dtype]
    error = (ours.double() - reference.double()).norm() / reference.double().norm()
    return bool(ours.isfinite().all()) and error.item() < step


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(96, 64), (50, 48), (37, 300)])
def test_project_is_the_linear_map_with_norm_bias_and_residual(dtype, tokens, n, k):
    x, weight, gain = random(tokens, k, dtype=dtype), random(n, k, dtype=dtype, scale=0.1), random(k, dtype=dtype)
    bias, base = random(n, dtype=dtype), random(tokens, n, dtype=dtype)
    assert near(gemv.project(x, weight), F.linear(x.double(), weight.double()))
    normed = F.linear(norm(x, gain), weight.double(), bias.double())
    assert near(gemv.project(x, weight, norm=gain, eps=EPS, bias=bias), normed)
    expected = base.double() + F.linear(x.double(), weight.double())
    given = gemv.project(x, weight, onto=base)
    assert given is base
    assert near(base, expected)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(96, 64), (50, 48)])
def test_gate_up_is_the_gated_half_of_the_block(dtype, tokens, n, k):
    x, weight, gain = random(tokens, k, dtype=dtype), random(2 * n, k, dtype=dtype, scale=0.2), random(k, dtype=dtype)
    gates, ups = F.linear(norm(x, gain), weight.double()).chunk(2, -1)
    assert near(gemv.gate_up(x, gain, EPS, weight), F.silu(gates) * ups)


@pytest.mark.parametrize("biased", [False, True])
def test_qkv_turns_and_stores_as_the_eager_functions_do(dtype, biased):
    heads, kv_heads, size, k = 6, 2, 16, 48
    n = (heads + 2 * kv_heads) * size
    x, weight, gain = random(2, k, dtype=dtype), random(n, k, dtype=dtype, scale=0.2), random(k, dtype=dtype)
    bias = random(n, dtype=dtype) if biased else None
    frequencies = 1 / 10000 ** (torch.arange(0, size, 2, device=DEVICE) / size)
    positions = torch.tensor([5, 1000], device=DEVICE)
    cells = torch.tensor([9, 3], device=DEVICE)
    ours, theirs = torch.full((2, 2, 20, kv_heads, size), -7.0, dtype=torch.float64, device=DEVICE)
    ours = ours.to(dtype)
    q = gemv.qkv(x, gain, EPS, weight, bias, frequencies, 1.5, positions, cells, ours)
    projected = F.linear(norm(x, gain), weight.double(), None if bias is None else bias.double())
    expected = eager.rope_store(projected, heads, frequencies, 1.5, positions, cells, None, EPS, theirs)
    assert near(q, expected)
    assert near(ours, theirs)
    plain = gemv.qkv(x, None, EPS, weight, bias, frequencies, 1.5, positions, cells, ours.clone())
    projected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert near(plain, eager.rope_store(projected, heads, frequencies, 1.5, positions, cells, None, EPS, theirs))
    untouched = [cell for cell in range(20) if cell not in cells.tolist()]
    assert bool((ours[:, untouched] == -7).all())


@pytest.mark.parametrize("tokens", [1, 2])
def test_head_finds_the_highest_logit_and_of_equals_the_first(dtype, tokens):
    n, k = 333, 64
    x, weight = random(tokens, k, dtype=dtype), random(n, k, dtype=dtype)
    weight[200] = weight[77] = 4 * x[0]  # equals far apart
    best, ids = gemv.head(x, weight)
    logits = F.linear(x.double(), weight.double())
    found = ids.gather(1, best.argmax(1, keepdim=True))[:, 0]
    assert found[0] == 77
    assert found.tolist() == logits.argmax(1).tolist()
    assert near(best.amax(1), logits.amax(1))


def test_maxima_and_advance_end_a_step(dtype):
    logits = random(3, 5000, dtype=dtype)
    logits[0, 4321] = logits[0, 99] = logits.max() + 1
    logits[2] = float("-inf")
    tokens, positions = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.arange(4, device=DEVICE)
    made, steps = torch.zeros((3, 1, 4), dtype=torch.int64, device=DEVICE), torch.tensor([0, 2, 1, 1], device=DEVICE)
    kernels.advance(*kernels.maxima(logits), tokens, made, positions, steps)
    right = [99, logits[1].argmax().item(), 0, 0]
    assert tokens.tolist() == right
    assert made[:, 0].tolist() == [[99, 0, 0, 0], [0, 0, 0, 0], [0, right[1], 0, 0]]
    assert positions.tolist() == [1, 2, 3, 3]
    assert steps.tolist() == [1, 3, 2, 1]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_next_likeliest_come_in_order_and_of_equals_the_lower_id_first(dtype, ranks):
    n = 5000
    logits = random(2, n, dtype=dtype)
    top = logits.max() + 1
    logits[0, [4321, 99, 98, 2047]] = top  # in two blocks
    logits[0, 4999] = top + 1
    logits[1, 3], logits[1, 2050] = top + 2, top + 1
    offsets = torch.randint(0, 50, (n,), device=DEVICE)
    tokens, positions, steps = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(3))
    made = torch.zeros((1, ranks, 3), dtype=torch.int64, device=DEVICE)
    kernels.advance(*kernels.maxima(logits, ranks), tokens, made, positions, steps, offsets)
    right = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :ranks]
    assert made[0, :, :2].T.tolist() == (right + offsets[right]).tolist()
    assert right[0].tolist() == [4999, 98, 99, 2047][:ranks]
    assert tokens.tolist() == made[0, 0, :2].tolist()
    assert made[0, :, 2].tolist() == [0] * ranks


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_the_best_is_the_same_token_with_and_without_the_next_likeliest(dtype, tokens):
    n, k = 5003, 64
    x, head = random(tokens, k, dtype=dtype), Linear(random(n, k, dtype=dtype))
    head.weight[4000] = head.weight[70] = 3 * x[0]  # equals far apart
    alone, ids = head.best(x)
    best, others = head.best(x, 4)
    assert torch.equal(ids.gather(1, alone.argmax(1, keepdim=True)), others.gather(1, best.argmax(1, keepdim=True)))
    assert torch.equal(alone.amax(1), best.amax(1))
    right = F.linear(x.double(), head.weight.double()).sort(dim=1, descending=True, stable=True).indices[:, :4]
    found = others.gather(1, best.sort(dim=1, descending=True, stable=True).indices[:, :4])
    assert found[0, :2].tolist() == [70, 4000]
    if tokens <= gemv.MOST_TOKENS:  # else logits are rounded, and equals many
        assert found.tolist() == right.tolist()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_join_is_both_norms_side_by_side(dtype, keep, tokens):
    n = 48
    table, features = random(30, n, dtype=dtype, scale=3.0), random(tokens, n, dtype=dtype)
    gains, ids = (random(n, dtype=dtype), random(n, dtype=dtype)), torch.randint(0, 30, (tokens,), device=DEVICE)
    before = features.clone()
    both = kernels.join(ids, table, features, *gains, EPS, keep)
    wide = before.double()
    assert near(both, eager.join(ids, table.double(), wide, *(gain.double() for gain in gains), EPS, keep))
    assert near(features, wide) if keep else torch.equal(features, before)


def test_weights_in_float8_are_scaled_back(dtype):
    n, k = 144, 80
    weight, scale = random(n, k, dtype=dtype).to(torch.float8_e4m3fn), torch.rand(n, device=DEVICE) + 0.1
    full, gain = weight.double() * scale.double()[:, None], random(k, dtype=dtype)
    x, bias = random(2, k, dtype=dtype), random(n, dtype=dtype)
    assert near(gemv.project(x, weight, scale=scale, bias=bias), F.linear(x.double(), full, bias.double()))
    gates, ups = F.linear(norm(x, gain), full).chunk(2, -1)
    assert near(gemv.gate_up(x, gain, EPS, weight, scale), F.silu(gates) * ups)
    best, ids = gemv.head(x, weight, scale)
    logits = F.linear(x.double(), full)
    assert near(best.amax(1), logits.amax(1))
    assert ids.gather(1, best.argmax(1, keepdim=True))[:, 0].tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(("lengths", "size"), [((1, 2), 32), ((63, 64), 32), ((129, 130), 128), ((700, 3), 64)])
def test_attend_is_attention_over_each_run(dtype, together, lengths, size):
    heads, kv_heads = 8, 2
    store = random(2, 2048, kv_heads, size, dtype=dtype)
    store[:, 1900:] = float("nan")  # no run reaches here
    positions = [max(0, n - together + i) for n in lengths for i in range(together)]
    firsts = [first for first in (1024, 64) for _ in range(together)]
    q = random(len(positions), heads, size, dtype=dtype, scale=2.0)
    where = torch.tensor(positions, device=DEVICE), torch.tensor(firsts, device=DEVICE)
    assert near(kernels.attend(q, store, *where, together), eager.attend(q.double(), store.double(), *where))


SPANS = [Span(1024, 0, 9), Span(64, 40, 1), Span(512, 100, 30), Span(0, 0, 1)]


def test_attention_span_by_span_is_attention_token_by_token(dtype):
    store = random(2, 2048, 2, 32, dtype=dtype)
    where = Pass.of(SPANS, torch.device(DEVICE))
    q = random(len(where.positions), 8, 32, dtype=dtype, scale=2.0)
    whole = eager.attend(q.double(), store.double(), where.positions, where.firsts)
    assert near(eager.attend_spans(q, store, SPANS), whole)


@pytest.mark.skipif(INTERPRETED, reason="of a GPU's time")
@pytest.mark.parametrize("span", SPANS[:3])
def test_a_length_that_was_never_seen_takes_no_longer(span):
    """cuDNN's attention takes 30 ms to plan for each."""
    store, took_s = random(2, 4096, 8, 128, dtype=torch.bfloat16), []
    for more in range(8):
        count = span.count + (more if span.count > 1 else 0)
        longer = Span(span.first, span.position + (7 * more if span.position else 0), count)
        q = random(count, 32, 128, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        start = time.perf_counter()
        eager.attend_spans(q, store, [longer])
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - start)
    assert statistics.median(took_s) < 0.01


def test_norm_gate_and_rope_are_the_eager_functions(dtype):
    x, delta, gain = random(5, 48, dtype=dtype), random(5, 48, dtype=dtype), random(48, dtype=dtype)
    added = x.double() + delta.double()
    assert near(kernels.add_norm(x, delta, gain, EPS), norm(added, gain))
    assert near(x, added)
    both = random(5, 2 * 37, dtype=dtype)
    assert near(kernels.gate(both), eager.gate(both.double()))
    heads, kv_heads, size = 4, 2, 16
    qkv, norms = random(2, 8 * size, dtype=dtype), (random(size, dtype=dtype), random(size, dtype=dtype))
    frequencies = 1 / 10000 ** (torch.arange(0, size, 2, device=DEVICE) / size)
    where = torch.tensor([3, 70], device=DEVICE), torch.tensor([11, 6], device=DEVICE)
    ours = torch.zeros((2, 16, kv_heads, size), dtype=dtype, device=DEVICE)
    theirs = ours.double()
    for pair in (None, norms):
        wide = None if pair is None else (pair[0].double(), pair[1].double())
        q = kernels.rope_store(qkv, heads, frequencies, 1.0, *where, pair, EPS, ours)
        assert near(q, eager.rope_store(qkv.double(), heads, frequencies, 1.0, *where, wide, EPS, theirs))
        assert near(ours, theirs)


@pytest.mark.parametrize("mutant", ["bias", "gain", "halves", "angle", "cell", "first", "position", "join"])
def test_a_wrong_operand_is_noticed(mutant):
    """The comparisons above, each with one operand of the kernel's changed."""
    dtype, heads, kv_heads, size, k = torch.float32, 4, 2, 32, 48
    n = (heads + 2 * kv_heads) * size
    x, weight, gain = random(2, k, dtype=dtype), random(n, k, dtype=dtype, scale=0.2), random(k, dtype=dtype)
    bias, wrong = random(n, dtype=dtype), gain.roll(1)
    normed = F.linear(norm(x, gain), weight.double(), bias.double())
    if mutant == "bias":
        assert not near(gemv.project(x, weight, norm=gain, eps=EPS), normed)
    elif mutant == "gain":
        assert not near(gemv.project(x, weight, norm=wrong, eps=EPS, bias=bias), normed)
    elif mutant == "halves":
        gates, ups = F.linear(norm(x, gain), weight.double()).chunk(2, -1)
        assert not near(gemv.gate_up(x, gain, EPS, weight.roll(n // 2, 0)), F.silu(gates) * ups)
    elif mutant == "join":
        ids = torch.tensor([1, 0], device=DEVICE)
        wide = eager.join(ids, weight.double(), x.double(), gain.double(), wrong.double(), EPS, False)
        assert not near(kernels.join(ids, weight, x, gain, gain, EPS, False), wide)
    positions, cells = torch.tensor([5, 300], device=DEVICE), torch.tensor([9, 3], device=DEVICE)
    frequencies = 1 / 10000 ** (torch.arange(0, size, 2, device=DEVICE) / size)
    ours = random(2, 400, kv_heads, size, dtype=dtype)
    theirs = ours.double()
    turned = eager.rope_store(normed, heads, frequencies, 1.0, positions, cells, None, EPS, theirs)
    if mutant in ("angle", "cell"):
        late, beside = positions + int(mutant == "angle"), cells + int(mutant == "cell")
        q = gemv.qkv(x, gain, EPS, weight, bias, frequencies, 1.0, late, beside, ours)
        assert not (near(q, turned) and near(ours, theirs))
    elif mutant in ("first", "position"):
        q, firsts = random(2, heads, size, dtype=dtype), torch.tensor([0, 50], device=DEVICE)
        mixed = kernels.attend(q, ours, positions - int(mutant == "position"), firsts + int(mutant == "first"))
        assert not near(mixed, eager.attend(q.double(), ours.double(), positions, firsts))
