"""client.py and bench.py without servers."""

import pytest

from specdec.bench import BenchSettings, asked, variants
from specdec.client import Decoded, _by_position
from specdec.errors import SettingsError


def test_what_was_decoded_adds_up():
    before, after = Decoded(10, 8, (4, 3), (2, 1)), Decoded(40, 20, (14, 9, 2), (8, 4, 1))
    between = after - before
    assert between == Decoded(30, 12, (10, 6, 2), (6, 3, 1))
    assert before + between == after
    assert between.accept_length == 2.5
    assert between.stood == [0.6, 0.5, 0.5]
    assert between.draft_length == 2  # ten accepted in ten cycles with drafts
    assert (Decoded(0, 0).accept_length, Decoded(5, 5).draft_length, Decoded(5, 5).stood) == (None, None, [])


def test_positions_are_read_in_order_and_as_far_as_they_go():
    values = {f'x{{position="{i}"}}': f"{i * 10}.0" for i in range(1, 12)} | {'x{position="13"}': "7.0"}
    assert _by_position(values, "x") == tuple(range(10, 120, 10))


def test_prompts_of_ones_own(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text('[{"kind": "a", "prompt": "Hello", "more": 1}]')
    assert asked(path) == [{"kind": "a", "prompt": "Hello"}]
    assert len(asked(None)) == 12


@pytest.mark.parametrize("text", ["", "{}1", "[1]", '[{"kind": "a"}]', '{"kind": "a"}'])
def test_a_file_of_no_prompts_is_refused(tmp_path, text):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match="not a list of"):
        asked(path)


def test_vllms_own_speculation_has_a_row_where_it_is_asked_for():
    names = [row.name for row in variants(BenchSettings.load(["--own", "3", "--windows", "1"]))]
    assert names[:3] == ["plain vLLM", "vLLM's own EAGLE-3", "off"]
    assert "vLLM's own EAGLE-3" not in [row.name for row in variants(BenchSettings.load([]))]
