"""router/members.py against json and msgspec: the same members, and the same texts refused."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.router import members as module
from specdec.router.members import NotJson, TooDeep, TooMany, members, named

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},: \n/é\u4e2d', max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='ab"\\[,', max_size=3), inner),
    max_leaves=30,
)

BYTES = [b"", *(bytes([byte]) for byte in b'[]{},:"\\1n '), b",,"]


@pytest.fixture(autouse=True, scope="module", params=[1, 6, 1 << 18])
def chunk(request):
    """Chunks of so many bytes: with the small ones every place is an edge."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", request.param)
        yield


@settings(max_examples=50, deadline=None)
@given(VALUES.filter(lambda value: isinstance(value, list | dict)), st.sampled_from([None, 1]), st.booleans())
def test_members_are_those_that_json_builds(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    got = members(text, 100, 100, check=True)
    if isinstance(value, list):
        assert [json.loads(one) for one in got] == value
    else:
        assert {name: json.loads(text) for name, text in map(named, got)} == value
    assert members(text, 100, 100, check=False) == got


@settings(max_examples=80, deadline=None)
@given(VALUES, st.data())
def test_what_is_no_json_is_refused_as_msgspec_does(value, data):
    """A valid text with a few bytes changed, taken out or put in."""
    text = bytearray(json.dumps([value, value]).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from(BYTES))
    text = bytes(text)
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
        valid = text.lstrip()[:1] in (b"[", b"{")
    except msgspec.DecodeError:
        valid = False
    try:
        members(text, 1000, 100, check=True)
        accepted = True
    except NotJson:
        accepted = False
    assert accepted == valid


@pytest.mark.parametrize(("count", "passes"), [(0, True), (1, True), (10, True), (11, False), (1000, False)])
def test_members_are_counted_at_the_outermost_only(count, passes):
    for one in ([[1, 2, 3, 4], {"a": 1, "b": 2}], "a,b,c,[,"):
        text = json.dumps([one] * count).encode()
        if passes:
            assert len(members(text, 10, 10, check=True)) == count
        else:
            with pytest.raises(TooMany):
                members(text, 10, 10, check=True)


def test_nesting_has_a_limit():
    def nested(depth: int) -> bytes:
        return b'[{"a":' * (depth // 2) + b"1" + b"}]" * (depth // 2)

    assert len(members(nested(10), 10, 10, check=True)) == 1
    for depth in (12, 1000, 100_000 if module._CHUNK > 10 else 100):
        with pytest.raises(TooDeep):
            members(nested(depth), 10, 10, check=True)


def refused(text: bytes, **more: Any) -> bool:
    try:
        members(text, 10, 10, check=True)
    except NotJson:
        return True
    return False


@pytest.mark.parametrize(
    "text", [b"", b" ", b"1", b'"[]"', b"]", b"[]]", b"[1,]", b"[,1]", b"[1,,2]", b"{}{}", b"[", b"[}"]
)
def test_what_is_no_container_is_refused(text):
    assert refused(text)


@pytest.mark.parametrize(
    "member", [b"", b"1", b'"a"', b'"a" 1', b'"\xff": 1', b'"\\ud800": 1', b'"%s": 1' % (b"a" * 5000)]
)
def test_a_member_without_a_name_is_none(member):
    with pytest.raises(NotJson):
        named(member)
