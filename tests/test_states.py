"""channel/states.py: hidden states from the worker to the draft."""

import random

import numpy as np
import pytest

from channel_kit import shared_folder
from specdec.channel.layout import STATES_SLOTS, Layout
from specdec.channel.segment import Role, Segment
from specdec.channel.states import DTYPES, Fed, StatesReader, StatesWriter
from specdec.errors import SetupError

LAYERS = (2, 4, 7)


@pytest.fixture(params=[4])
def ends(request):
    """(the worker's segment, the draft's); the ring's size is the parameter."""
    with (
        shared_folder() as folder,
        Segment.create(folder / "specdec-p", Layout(4, 4, 64, states_mb=request.param)) as owner,
        Segment.attach(owner.path, Role.WORKER) as worker,
        Segment.attach(owner.path, Role.DRAFT) as draft,
    ):
        yield worker, draft


def numbers(rng, tokens, width, dtype):
    kind = DTYPES[dtype]
    return np.frombuffer(rng.randbytes(tokens * width * kind.itemsize), kind).reshape(tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 48, 3000])
def test_passes_of_every_size_arrive_as_they_were(ends, dtype, width):
    worker, draft = ends
    rng = random.Random(width)
    reader, writer = StatesReader(draft, LAYERS), StatesWriter(worker, LAYERS, width, dtype)
    for _ in range(20):
        fed = [Fed(n, rng.randrange(9), rng.randrange(99), rng.choice((0, 1, 3, 40))) for n in range(rng.randint(0, 5))]
        total = sum(row.tokens for row in fed)
        ids = np.array([rng.randrange(2**31) for _ in range(total)], np.int32)
        states = numbers(rng, total, width, dtype)
        writer.write(fed, ids, states)
        came = list(reader.read_all())
        at = {row.session: row.position for row in fed}
        for session, part in came:  # cut, in order, nothing missing and nothing twice
            assert part.position == at[session]
            at[session] += len(part.tokens)
            assert part.dtype == dtype
        assert at == {row.session: row.position + row.tokens for row in fed}
        assert [token for _, part in came for token in part.tokens] == ids.tolist()
        assert b"".join(part.rows.tobytes() for _, part in came) == states.tobytes()


def test_what_finds_the_ring_full_is_counted_and_what_comes_later_arrives(ends):
    worker, draft = ends
    reader, writer = StatesReader(draft, LAYERS), StatesWriter(worker, LAYERS, 2, "float32")
    for position in range(STATES_SLOTS + 3):
        writer.write([Fed(1, 1, position, 1)], np.ones(1, np.int32), np.ones((1, 2), np.float32))
    assert worker.word("worker.states_lost").value == 3
    assert [part.position for _, part in reader.read_all()] == list(range(STATES_SLOTS))
    writer.write([Fed(1, 1, 99, 1)], np.ones(1, np.int32), np.ones((1, 2), np.float32))
    assert [part.position for _, part in reader.read_all()] == [99]


@pytest.mark.parametrize("ends", [1], indirect=True)
def test_a_token_too_wide_for_the_ring_is_refused_with_the_size_it_needs(ends):
    worker, _ = ends
    with pytest.raises(SetupError, match=r"4 drafts and the token before them .* raise --states-mb to 2 or more"):
        StatesWriter(worker, LAYERS, 900, "float32")
    StatesWriter(worker, LAYERS, 800, "float32")


def test_a_row_with_drafts_is_never_cut(ends):
    """Whether the states after a rejected draft stand is seen only beside the drafts before them."""
    worker, draft = ends
    reader, writer = StatesReader(draft, LAYERS), StatesWriter(worker, LAYERS, 1000, "float32")
    rng = random.Random(3)
    for _ in range(50):
        fed = [Fed(n, 1, 10 * n, rng.randint(1, 5)) for n in range(6)]
        total = sum(row.tokens for row in fed)
        writer.write(fed, np.arange(total, dtype=np.int32), np.ones((total, 1000), np.float32))
        assert [(n, len(part.tokens)) for n, part in reader.read_all()] == [(row.session, row.tokens) for row in fed]
    writer.write([Fed(1, 1, 0, 500)], np.arange(500, dtype=np.int32), np.ones((500, 1000), np.float32))
    assert len(list(reader.read_all())) > 1, "a prompt is"


def test_states_of_other_layers_are_refused(ends):
    worker, draft = ends
    reader = StatesReader(draft, LAYERS)
    one = np.ones((1, 2), np.float32)
    StatesWriter(worker, (2, 7, 4), 2, "float32").write([Fed(1, 1, 0, 1)], np.ones(1, np.int32), one)
    with pytest.raises(SetupError, match="after layers 2,7,4, the head reads 2,4,7"):
        list(reader.read_all())
