"""channel/layout.py: the map of the segment."""

import numpy as np
import pytest

from channel_kit import Ring
from specdec.channel import layout
from specdec.channel.layout import (
    CONTROL_WORDS,
    COUNT_WORDS,
    DRAFT_WORDS,
    ENGINE_WORDS,
    IDENTITY,
    LINE,
    OPENED_ROW,
    ORDER_ROW,
    OUTCOME_HEAD,
    OUTCOME_ROW,
    PAGE,
    PROPOSAL_HEAD,
    PROPOSAL_ROW,
    STATES_SLOTS,
    VERDICT_HEAD,
    VERDICT_ROW,
    WORDS_AT,
    WORKER_WORDS,
    Layout,
)

LAYOUTS = [Layout(1, 1, 1), Layout(2, 4, 16), Layout(7, 3, 33), Layout(16, 8), Layout(64, 1, 1), Layout(512, 16)]
LAYOUTS += [Layout(16, 8, 1024, 1), Layout(16, 8, 1024, 64)]
RECORDS = ["IDENTITY", "ORDER_ROW", "SLOT_HEAD", "OUTCOME_HEAD", "OUTCOME_ROW", "PROPOSAL_HEAD", "PROPOSAL_ROW"]
RECORDS += ["VERDICT_HEAD", "VERDICT_ROW", "OPENED_ROW", "STATES_HEAD", "STATES_ROW"]
BASE = Layout(16, 8, 1024)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_areas_are_aligned_and_follow_each_other(sizes):
    end = PAGE
    starts = [(sizes.orders_start, sizes.orders_start + sizes.max_sessions * ORDER_ROW.itemsize)]
    starts += [(area.start, area.end) for area in (sizes.verdicts, sizes.outcomes, sizes.proposals)]
    for start, area_end in starts:
        assert start % PAGE == 0
        assert end <= start < end + PAGE  # no overlap, and no more lost than the alignment takes
        assert area_end > start
        end = area_end
    assert (sizes.states.start, sizes.states.slot_bytes % LINE) == (end + -end % PAGE, 0)
    assert sizes.states_mb * 2**20 - STATES_SLOTS * LINE < sizes.states.end - sizes.states.start + 1
    end = sizes.states.end
    assert end <= sizes.size < end + PAGE
    assert sizes.size % PAGE == 0
    for area in (sizes.verdicts, sizes.outcomes, sizes.proposals):
        assert area.slot_bytes % LINE == 0
        assert area.end - area.start == area.slots * area.slot_bytes


def test_the_header_holds_its_words():
    lines = (ENGINE_WORDS, DRAFT_WORDS, CONTROL_WORDS, COUNT_WORDS, WORKER_WORDS)
    assert IDENTITY.itemsize <= WORDS_AT
    assert WORDS_AT % LINE == 0  # a line a writer, and no two on one
    assert all(8 * len(names) <= LINE for names in lines)
    assert all(len(set(names)) == len(names) for names in lines)
    assert WORDS_AT + len(lines) * LINE <= PAGE
    assert ORDER_ROW.itemsize == LINE
    assert max(offset + kind.itemsize for kind, offset, *_ in ORDER_ROW.fields.values()) <= LINE


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_the_largest_frame_of_every_kind_fits_its_slot(sizes):
    n, k = sizes.max_sessions, sizes.max_steps
    frames = {
        "verdicts": [np.ones(1, VERDICT_HEAD), np.ones(n, OPENED_ROW), np.ones(2 * n, VERDICT_ROW)],
        "outcomes": [np.ones(1, OUTCOME_HEAD), np.ones(2 * n, OUTCOME_ROW), np.ones(sizes.frame_tokens, np.int32)],
        "proposals": [np.ones(1, PROPOSAL_HEAD), np.ones(n, PROPOSAL_ROW), np.ones(n * k, np.int32)],
    }
    for name, parts in frames.items():
        ring = Ring(slots=1, slot_bytes=getattr(sizes, name).slot_bytes)
        assert ring.writer().write(*parts), name
        assert ring.reader().read() == b"".join(part.tobytes() for part in parts)
        with pytest.raises(ValueError, match="does not fit"):  # what is left is less than a line
            ring.writer().write(*parts, bytes(LINE))


@pytest.mark.parametrize(
    "other",
    [Layout(17, 8, 1024), Layout(15, 8, 1024), Layout(16, 9, 1024), Layout(16, 8, 1025), Layout(16, 8, 1024, 1)],
    ids=str,
)
def test_the_hash_changes_with_every_size(other):
    assert other.hash != BASE.hash


def test_the_hash_is_of_the_sizes_alone():
    assert Layout(16, 8, 1024).hash == BASE.hash
    assert 0 <= BASE.hash < 2**64


def variants(record):
    """The record with each field renamed, of another kind and moved to the end in turn, and with one more."""
    fields = [(name, record.fields[name][0]) for name in record.names]
    for i, (name, kind) in enumerate(fields):
        rest = fields[:i] + fields[i + 1 :]
        yield np.dtype([*fields[:i], (name + "_", kind), *fields[i + 1 :]])
        yield np.dtype([*fields[:i], (name, f"V{kind.itemsize}"), *fields[i + 1 :]])
        if i < len(rest):
            yield np.dtype([*rest, (name, kind)])
    yield np.dtype([*fields, ("more", "<u4")])


@pytest.mark.parametrize("name", RECORDS)
def test_the_hash_changes_with_every_field(name, monkeypatch):
    before, seen = BASE.hash, set()
    made = list(variants(getattr(layout, name)))
    for variant in made:
        monkeypatch.setattr(layout, name, variant)
        seen.add(BASE.hash)
    assert before not in seen
    assert len(seen) == len(made)


@pytest.mark.parametrize(
    "name", ["ENGINE_WORDS", "DRAFT_WORDS", "CONTROL_WORDS", "COUNT_WORDS", "WORKER_WORDS", "REASONS"]
)
def test_the_hash_changes_with_every_word(name, monkeypatch):
    words, before = getattr(layout, name), BASE.hash
    for i in range(len(words)):
        monkeypatch.setattr(layout, name, (*words[:i], words[i] + "_", *words[i + 1 :]))
        assert BASE.hash != before
    monkeypatch.setattr(layout, name, (*words, "more"))
    assert BASE.hash != before


@pytest.mark.parametrize(
    "name",
    ["VERSION", "WORDS_AT", "VERDICT_SLOTS", "OUTCOME_SLOTS", "PROPOSAL_SLOTS", "STATES_SLOTS", "PAGE", "LINE"],
)
def test_the_hash_changes_with_every_number(name, monkeypatch):
    before = BASE.hash
    monkeypatch.setattr(layout, name, 2 * getattr(layout, name))
    assert BASE.hash != before
