"""`specdec demo`: one marked answer, then twelve prompts against plain vLLM and against the stack, interleaved."""

import json
import sys
from importlib.resources import files
from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.client import Answer, chat, decoded, stream_chat
from specdec.model import NAME as MODEL
from specdec.model import demo_model
from specdec.settings import Settings
from specdec.stack import DEMO_VLLM_ARGS, Plain, Stack, demo_draft, log_folder, say

_QUESTION = (
    "Here is a Python function:\n\ndef area(width, height):\n    return width * height\n\n"
    "Write the same for a triangle and for a circle, each with a docstring."
)


class DemoSettings(Settings):
    """Start plain vLLM and the stack, show one answer with the draft's right guesses marked, then compare both on
    twelve prompts (float32, greedy). The last line on standard output is the result as JSON; exit code 0 only if every
    token is identical."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DEMO_")
    section: ClassVar[str] = "demo"

    drafter: str = Field("eagle3", description="as specdec draft --drafter; eagle3 is the demo model's own head")
    max_tokens: int = Field(128, ge=2, le=1024, description="longest answer to each of the twelve prompts")


def prompts() -> list[dict[str, str]]:
    """The twelve prompts, each {"kind": "chat" | "code" | "summarise", "prompt": ...}."""
    loaded: list[dict[str, str]] = json.loads((files("specdec") / "data" / "demo_prompts.json").read_text())
    return loaded


def demo(argv: list[str]) -> int:
    """The command."""
    settings = DemoSettings.load(argv)
    say("demo model: SmolLM2-135M-Instruct (converted once, half a minute, 270 MB)")
    model = demo_model()
    with log_folder() as logs:
        say(f"logs in {logs.folder} until all is well")
        drafter, head = demo_draft(settings.drafter, None)
        with (
            Stack(
                model, logs.folder, drafter=drafter, draft_model=head, vllm_args=DEMO_VLLM_ARGS, progress=say
            ) as stack,
            Plain(model, logs.folder, DEMO_VLLM_ARGS) as plain,
        ):
            stack.wait_ready()
            say("waiting for plain vLLM, which has no plug-in")
            plain.wait_ready(600)
            _show_answer(stack.url, str(model))
            result = _compare(plain.url, stack, settings)
            say("stopping everything")
        logs.keep = not result["identical"]
    print(json.dumps(result), flush=True)
    return 0 if result["identical"] else 1


def _show_answer(url: str, model: str) -> None:
    """Streams one answer; tokens the draft got right are green and underlined, or in [brackets] without a terminal."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    before, after = ("\033[32;4m", "\033[0m") if sys.stdout.isatty() else ("[", "]")
    print(f"\n> {_QUESTION}\n\nThe answer, with the tokens the draft guessed right marked {before}like this{after}:\n")
    answer = Answer()
    ids: list[int] = []
    shown = ""
    for _, new, so_far in stream_chat(url, MODEL, _QUESTION, temperature=0, max_tokens=160):
        answer = so_far
        for number, token in enumerate(new):
            ids.append(token)
            text = tokenizer.decode(ids)
            if text.endswith("\ufffd"):
                continue  # a character still in parts
            piece, shown = text[len(shown) :], text
            guessed = number < len(new) - 1
            print(f"{before}{piece}{after}" if guessed and piece else piece, end="", flush=True)
    print(
        f"\n\n{answer.completion_tokens} tokens in {answer.total_s:.1f} s, {answer.accepted} of them from the draft\n",
        flush=True,
    )


def _compare(plain_url: str, stack: Stack, settings: DemoSettings) -> dict[str, object]:
    sums = {"plain": Answer(), "stack": Answer()}
    parameters = {"temperature": 0, "max_tokens": settings.max_tokens}
    identical = True
    for url in (plain_url, stack.url):  # first requests pay for lazy set-up on either side
        chat(url, MODEL, "Hello!", temperature=0, max_tokens=8)
    before = decoded(stack.verifier_url)
    for number, prompt in enumerate(prompts()):
        sides = [("plain", plain_url), ("stack", stack.url)]
        answers = {}
        for name, url in sides if number % 2 == 0 else reversed(sides):
            answers[name] = answer = chat(url, MODEL, prompt["prompt"], **parameters)
            sums[name].completion_tokens += answer.completion_tokens
            sums[name].total_s += answer.total_s
        same = answers["plain"].token_ids == answers["stack"].token_ids
        identical = identical and same
        say(
            f"{number + 1:2}/12 {prompt['kind']:9} plain {_rate(answers['plain']):5.1f} tok/s, "
            f"stack {_rate(answers['stack']):5.1f} tok/s, {'identical' if same else 'DIFFERENT'}"
        )
    accept_length = (decoded(stack.verifier_url) - before).accept_length
    tok_s, baseline = _rate(sums["stack"]), _rate(sums["plain"])
    return {
        "ok": identical,
        "model": MODEL,
        "draft": settings.drafter,
        "tok_s": round(tok_s, 1),
        "baseline_tok_s": round(baseline, 1),
        "speedup": round(tok_s / baseline, 3),
        "accept_length": round(accept_length or 1, 3),
        "identical": identical,
    }


def _rate(answer: Answer) -> float:
    return answer.completion_tokens / answer.total_s
