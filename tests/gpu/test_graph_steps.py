"""The captured graphs against step by step drafting and against transformers: drafts, rollback, any batch and k."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from specdec.draft.drafters import DraftSession
from specdec.draft.drafters.causal import CausalDrafter
from specdec.draft.model.decoder import CausalModel
from specdec.draft.model.steps import EagerSteps, GraphSteps
from specdec.draft.runahead import RANKS
from specdec.errors import CheckpointError

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCABULARY = 197
MAX_BATCH = 6  # buckets of 1, 2, 4 and 6 sessions: with two tokens each, both sides of gemv.MOST_TOKENS
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**SIZES), "qwen3": Qwen3Config(**SIZES)}
# How far below the highest logit a draft's may be, in standard deviations of the logits; a random token's is 3 below.
# Plain torch in bfloat16, on a CPU, comes to 0.07 with these models.
SLACK = {"float32": 1e-3, "bfloat16": 0.25}


class Reference:
    """transformers' model in float32, with the weights the draft has."""

    def __init__(self, config, folder):
        torch.manual_seed(3)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for name, parameter in self.model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
        self.model.save_pretrained(folder)
        self.model = self.model.float().cuda()
        self.folder = folder

    def quantized(self):
        """The same with each linear map's weights as near as 8 bits bring them, a scale for each output."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        for module in other.model.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.data.abs().amax(1, keepdim=True) / 448
                module.weight.data = (module.weight.data / scale).to(torch.float8_e4m3fn).float() * scale
        return other

    @torch.inference_mode()
    def runners_gap(self, tokens, drafts, runners):
        """The same for what is said to come next in each draft's place, each against the one it stands for."""
        logits = self.model(torch.tensor([[*tokens, *drafts]], device="cuda")).logits[0, len(tokens) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(runners, device="cuda"))
        return ((logits.topk(RANKS).values[:, 1:] - chosen).max() / logits.std()).item()

    @torch.inference_mode()
    def gap(self, tokens, drafts):
        """How far the worst of the drafts lies below the likeliest token after all before it; see SLACK."""
        logits = self.model(torch.tensor([[*tokens, *drafts]], device="cuda")).logits[0, len(tokens) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(drafts, device="cuda")[:, None])[:, 0]
        return ((logits.amax(1) - chosen).max() / logits.std()).item()


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
    return Reference(CONFIGS[request.param], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=SLACK)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def drafter(reference, dtype):
    made = CausalDrafter(reference.folder, device="cuda:0", dtype=dtype, memory_bytes=1 << 26, max_batch=MAX_BATCH)
    assert isinstance(made._steps, GraphSteps)
    return made


def words(dice, count):
    return [dice.randrange(VOCABULARY) for _ in range(count)]


def test_any_number_of_drafts_may_be_accepted_in_any_batch(reference, dtype, drafter):
    dice = random.Random(2)
    sessions = [DraftSession(i, 1, words(dice, 1 + 40 * i)) for i in range(MAX_BATCH + 3)]
    for batch in (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 4, 6):
        asked = dice.sample(sessions, batch)
        steps = [dice.randint(1, 8) for _ in asked]
        drafts = drafter.propose(asked, steps)
        for session, ids, k in zip(asked, drafts, steps, strict=True):
            assert len(ids) == k
            assert reference.gap(session.tokens, ids) <= SLACK[dtype]
            session.tokens += ids[: dice.randint(0, len(ids))] + words(dice, dice.choice((1, 1, 1, 9)))
    for session in sessions:
        drafter.forget(session)


def test_graphs_draft_what_single_steps_draft_and_repeat_themselves(reference, dtype, drafter):
    dice = random.Random(5)
    other = CausalDrafter(reference.folder, device="cuda:0", dtype=dtype, memory_bytes=1 << 26, max_batch=1)
    other._steps = EagerSteps(other._model, other._pool, other._device)
    sessions = [DraftSession(i, 1, words(dice, 3 + 70 * i)) for i in range(MAX_BATCH)]
    same = total = 0
    for batch in (1, 2, 4, 6):
        asked, steps = sessions[:batch], [5] * batch
        graphs = drafter.propose(asked, steps)
        assert drafter.propose(asked, steps) == graphs
        singly = other.propose(asked, steps)
        assert all(reference.gap(s.tokens, ids) <= SLACK[dtype] for s, ids in zip(asked, graphs, strict=True))
        same += sum(a == b for pair in zip(graphs, singly, strict=True) for a, b in zip(*pair, strict=True))
        total += 5 * batch
        for session, ids in zip(asked, graphs, strict=True):
            session.tokens += ids[:2] + words(dice, 1)
    for session in sessions:
        drafter.forget(session)
    assert same == total if dtype == "float32" else same >= 0.7 * total  # after one near tie the rest differs


def next_likeliest(reference, dtype, drafter):
    """Drafts for 1, 2, 4 and 6 sessions, the same with and without `run_ahead`, and the widest gap of the runners."""
    dice, widest = random.Random(12), 0.0
    ahead = CausalDrafter(
        reference.folder, device="cuda:0", dtype=dtype, memory_bytes=1 << 26, max_batch=MAX_BATCH, run_ahead=True
    )
    sessions = [DraftSession(i, 1, words(dice, 4 + 30 * i)) for i in range(MAX_BATCH)]
    for batch in (1, 2, 4, 6):
        drafts = ahead.propose(sessions[:batch], [5] * batch)
        assert drafts == drafter.propose(sessions[:batch], [5] * batch)
        for session, ids in zip(sessions, drafts, strict=False):
            runners = ahead._lines[session].main.runners
            assert all(len({best, *others}) == RANKS for best, others in zip(ids, runners, strict=True))
            widest = max(widest, reference.runners_gap(session.tokens, ids, runners))
            session.tokens += ids[:2] + words(dice, 1)
    for session in sessions:
        drafter.forget(session)
    return widest


def test_where_it_runs_ahead_the_next_likeliest_are_known_and_the_best_is_the_same(reference, dtype, drafter):
    assert next_likeliest(reference, dtype, drafter) <= SLACK[dtype]


def test_wrong_next_likeliest_are_noticed(reference, dtype, drafter, monkeypatch):
    best = CausalModel.best

    def reversed_but_the_best(self, hidden, ranks=1):
        highest, ids = best(self, hidden, ranks)
        return highest, ids.flip(1).roll(1, 1)  # the first stays: all of this vocabulary is one block

    monkeypatch.setattr(CausalModel, "best", reversed_but_the_best)
    assert next_likeliest(reference, dtype, drafter) > SLACK[dtype]


def test_heads_that_the_kernels_do_not_compute_are_refused(tmp_path):
    config = LlamaConfig(**(SIZES | {"head_dim": 24}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="heads of 24 values"):
        CausalDrafter(tmp_path, device="cuda:0", memory_bytes=1 << 24)


def test_rows_without_a_session_write_nowhere_else(drafter):
    """A bucket's spare rows go to cells of their own: a neighbour's text is drafted the same before and after."""
    dice = random.Random(6)
    first, second = (DraftSession(i, 1, words(dice, 60)) for i in range(2))
    before = drafter.propose([first], [4])
    for batch in (3, 5):  # buckets of 4 and 6
        others = [DraftSession(10 + i, 1, words(dice, 20)) for i in range(batch - 1)]
        drafter.propose([second, *others], [8] * batch)
        for session in others:
            drafter.forget(session)
    assert drafter.propose([first], [4]) == before
    for session in (first, second):
        drafter.forget(session)


def test_graphs_wait_until_the_text_has_been_read(reference, dtype, drafter, monkeypatch):
    """Texts are read on the caller's stream, graphs run on another; here the reading takes a tenth of a second."""
    hidden = drafter._model.hidden

    def slowly(*arguments):
        torch.cuda._sleep(200_000_000)  # clock cycles
        return hidden(*arguments)

    monkeypatch.setattr(drafter._model, "hidden", slowly)
    session = DraftSession(1, 1, words(random.Random(8), 90))
    assert reference.gap(session.tokens, drafter.propose([session], [4])[0]) <= SLACK[dtype]
    drafter.forget(session)


def test_a_long_text_read_in_pieces_is_read_as_transformers_reads_it(reference, dtype, drafter, monkeypatch):
    monkeypatch.setattr("specdec.draft.drafters.causal._PASS_TOKENS", 300)
    session = DraftSession(1, 1, words(random.Random(9), 1000))
    assert reference.gap(session.tokens, drafter.propose([session], [6])[0]) <= SLACK[dtype]
    drafter.forget(session)


def test_weights_in_8_bits_are_those_of_the_model_rounded(reference):
    dice, rounded = random.Random(10), reference.quantized()
    drafter = CausalDrafter(reference.folder, device="cuda:0", dtype="fp8", memory_bytes=1 << 26, max_batch=MAX_BATCH)
    sessions = [DraftSession(i, 1, words(dice, 20 + 30 * i)) for i in range(MAX_BATCH)]
    for batch in (1, 2, 4, 6):
        drafts = drafter.propose(sessions[:batch], [4] * batch)
        assert all(
            rounded.gap(s.tokens, ids) <= SLACK["bfloat16"] for s, ids in zip(sessions[:batch], drafts, strict=True)
        )
        assert drafter.propose(sessions[:batch], [4] * batch) == drafts


@pytest.mark.parametrize("mutant", ["position", "first", "tail"])
def test_a_wrong_row_is_noticed(reference, dtype, drafter, monkeypatch, mutant):
    """The comparison with transformers, with one field of the rows off by one."""
    wrong = {
        "position": lambda row: replace(row, length=row.length + 1),
        "first": lambda row: replace(row, first=row.first + 1),
        "tail": lambda row: replace(row, tail=(row.tail[1], row.tail[1])),
    }[mutant]
    dice, ranked = random.Random(11), drafter._steps.ranked
    sessions = [DraftSession(i, 1, words(dice, 50)) for i in range(MAX_BATCH)]
    monkeypatch.setattr(drafter._steps, "ranked", lambda rows, steps: ranked([wrong(row) for row in rows], steps))
    drafts = drafter.propose(sessions, [5] * MAX_BATCH)
    assert max(reference.gap(s.tokens, ids) for s, ids in zip(sessions, drafts, strict=True)) > SLACK[dtype]
    for session in sessions:
        drafter.forget(session)
