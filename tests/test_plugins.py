"""Classes of a user's own, by name."""

import sys

import pytest

from specdec.draft.drafters import load_drafter
from specdec.errors import SettingsError
from specdec.router.steps import load_policy

MINE = """
class Drafter:
    def propose(self, sessions, steps): return [[7] * k for k in steps]
    def forget(self, session): pass

class Policy:
    def __init__(self, steps, max_steps, window): self.made_with = (steps, max_steps, window)
    def order(self, session): pass
    def observe(self, verdict): pass

class Nothing:
    def __init__(self, *arguments): pass

class Fails:
    def __init__(self, *arguments): raise RuntimeError("no weights here")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module in the current folder, which is not on Python's path."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    return name


def test_a_class_of_the_current_folder_is_found(mine):
    assert load_drafter(f"{mine}:Drafter").propose([None], [3]) == [[7, 7, 7]]
    assert load_policy(f"{mine}:Policy", 4, 8, 2).made_with == (4, 8, 2)


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("Nothing", "has no method '{verb}'"),
        ("Fails", "RuntimeError: no weights here"),
        ("Missing", "AttributeError"),
    ],
)
def test_what_is_wrong_with_a_class_is_said_at_start(mine, attribute, words):
    with pytest.raises(SettingsError, match=words.format(verb="propose")) as refused:
        load_drafter(f"{mine}:{attribute}")
    assert "--drafter" in str(refused.value)
    with pytest.raises(SettingsError, match=words.format(verb="order")) as refused:
        load_policy(f"{mine}:{attribute}", 4, 8, 2)
    assert "--policy" in str(refused.value)


def test_a_module_that_is_nowhere_says_where_it_was_looked_for(mine, tmp_path):
    with pytest.raises(SettingsError, match="PYTHONPATH") as refused:
        load_drafter("no_such_module:Drafter")
    assert str(tmp_path) in str(refused.value)
