"""`specdec check`, as `helm test` runs it."""

import pytest

from fake_openai import FakeOpenAI
from specdec.check import accept_length, check
from specdec.cli import main
from specdec.client import Answer


def fake(**settings) -> FakeOpenAI:
    return FakeOpenAI(first_s=0.01, cycle_s=0.001, **settings)


def test_an_answer_with_accepted_drafts_passes_and_says_its_accept_length(tmp_path, capsys):
    (tmp_path / "keys").write_text(f"\n# ours\nsha256:{64 * '0'}\n first-key \nsecond-key\n")
    with fake(accepted=lambda speculative: 2).serving() as server:
        assert check(["--url", server.url, "--api-key-file", str(tmp_path / "keys")]) == 0
        (sent,) = server.sent.values()
    assert (sent.authorization, sent.body["model"], sent.body["temperature"]) == ("Bearer first-key", "fake-model", 0)
    said = capsys.readouterr().out
    assert f"{sent.accepted} of {sent.accepted + sent.rejected} drafts accepted: accept length 2.91" in said


def test_an_answer_that_was_decoded_plainly_fails_once_the_wait_is_over(capsys):
    with fake(accepted=lambda speculative: 0).serving() as server:
        assert check(["--url", server.url, "--wait-s", "3.5"]) == 1
        assert len(server.sent) == 1  # by request id, and it sends none
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("accept length 1.00") == 2  # the first time, and the end


@pytest.mark.parametrize("fault", ["500", "error event", "cut", "html", "no [DONE]"])
def test_an_answer_that_fails_fails(fault, capsys):
    with fake(fault=lambda number: fault).serving() as server:
        assert check(["--url", server.url, "--wait-s", "0"]) == 1
    assert "specdec check: http://127.0.0.1" in capsys.readouterr().err


def test_a_router_that_is_not_there_fails(capsys):
    assert check(["--url", "http://127.0.0.1:9", "--wait-s", "0"]) == 1
    assert "ConnectError" in capsys.readouterr().err
    assert check(["--url", "127.0.0.1:9", "--wait-s", "0"]) == 1


@pytest.mark.parametrize("content", ["", "\n", "sha256:" + 64 * "0"])
def test_a_file_without_a_key_is_refused(tmp_path, content, capsys):
    (tmp_path / "keys").write_text(content)
    assert main(["check", "--api-key-file", str(tmp_path / "keys")]) == 2
    assert main(["check", "--api-key-file", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("--api-key-file") == 2


def test_accept_length_is_tokens_a_cycle():
    assert accept_length(Answer(completion_tokens=30, accepted=20)) == 3
    assert accept_length(Answer(completion_tokens=30)) == 1
    assert accept_length(Answer()) == 0


@pytest.mark.engine
def test_the_real_stack_passes(engine_stack, capsys):
    engine_stack.start_draft("ngram")
    engine_stack.start_router("--policy", "fixed", "--steps", "3")
    engine_stack.wait_ready()
    assert check(["--url", engine_stack.url, "--wait-s", "20"]) == 0
    assert "drafts accepted: accept length" in capsys.readouterr().out
