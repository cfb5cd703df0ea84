"""`specdec check`: one chat question to a running stack, and whether speculation helped to answer it. `helm test`."""

import sys
import time
from pathlib import Path
from typing import ClassVar

import httpx
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.client import Answer, AnswerError, bearer, chat
from specdec.errors import SettingsError
from specdec.settings import Settings

_PAUSE_S = 3.0
_PROMPT = "Count from one to twenty, in words, then do it again."  # drafts of any kind stand in the second round


class CheckSettings(Settings):
    """Ask a running stack one chat question. Exit code 0 if it is answered, with accepted drafts; while that is not so,
    ask again until --wait-s is over, since a draft may still be loading."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_CHECK_")
    section: ClassVar[str] = "check"

    url: str = Field("http://127.0.0.1:8000", description="where the router answers")
    api_key_file: Path | None = Field(None, description="file with an API key; the first that is no digest is sent")
    model: str = Field("", description="the model to ask; default the first that the router serves")
    prompt: str = Field(_PROMPT, min_length=1, description="the question")
    max_tokens: int = Field(96, ge=2, description="longest answer")
    above: float = Field(1.0, ge=1, description="the accept length, tokens a cycle, that the answer must exceed")
    wait_s: float = Field(60, ge=0, description="how long to ask again")


def check(argv: list[str]) -> int:
    """The command."""
    settings = CheckSettings.load(argv)
    key = _first_key(settings.api_key_file) if settings.api_key_file else None
    until = time.monotonic() + settings.wait_s
    while True:
        try:
            model = settings.model or _first_model(settings.url, key)
            parameters = {"temperature": 0, "max_tokens": settings.max_tokens}
            answer = chat(settings.url, model, settings.prompt, api_key=key, **parameters)
            fault = "" if accept_length(answer) > settings.above else _summary(answer)
        except AnswerError as error:
            fault = str(error)
        if not fault:
            print(f"{model}: {answer.text.strip()}\n\n{_summary(answer)}")
            return 0
        if time.monotonic() + _PAUSE_S > until:
            print(f"specdec check: {fault}", file=sys.stderr)
            return 1
        print(f"asking again: {fault}", file=sys.stderr)
        time.sleep(_PAUSE_S)


def accept_length(answer: Answer) -> float:
    """Tokens a cycle, over the whole answer: every cycle adds one token of the target's own to what it accepted."""
    return answer.completion_tokens / max(1, answer.completion_tokens - answer.accepted)


def _summary(answer: Answer) -> str:
    drafts = answer.accepted + answer.rejected
    stood = f"{answer.accepted} of {drafts} drafts accepted" if drafts else "no drafts, it was decoded plainly"
    length = accept_length(answer)
    return f"{answer.completion_tokens} tokens in {answer.total_s:.1f} s, {stood}: accept length {length:.2f}"


def _first_key(path: Path) -> str:
    """Of a file as the router's --api-keys-file: comments and digests are passed over."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"--api-key-file {path}: {error}") from error
    keys = [line for line in lines if line and not line.startswith(("#", "sha256:"))]
    if not keys:
        raise SettingsError(f"--api-key-file {path}: it has no key that can be sent, at most digests")
    return keys[0]


def _first_model(url: str, key: str | None) -> str:
    try:
        response = httpx.get(f"{url}/v1/models", headers=bearer(key), timeout=30, trust_env=False)
        if response.status_code != 200:
            raise AnswerError(f"{url}/v1/models: {response.status_code}: {response.text[:300]}")
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise AnswerError(f"{url}/v1/models: {type(error).__name__}: {error}") from error
