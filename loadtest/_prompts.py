"""What is asked: seeded conversations of four kinds, from the texts in this folder.

A conversation depends on the seed, its kind and its number only, so the same numbers ask the same of every variant and
every machine.
"""

import csv
import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

from loadtest._client import Message, SetupError

FOLDER = Path(__file__).parent
KINDS = ("chat", "summarise", "code", "agent")
MIXED = "mixed"
_MIX = {"chat": 4, "summarise": 2, "code": 3, "agent": 1}  # shares of a mixed load
_CHARS_A_TOKEN = 4.2  # of English in common tokenizers, until the server has said better
_MIN_CHARS = 24


@dataclass(frozen=True)
class Lengths:
    """A distribution of a length in tokens: log-normal, or uniform where `sigma` is None."""

    low: float  # the median of a log-normal one
    high: float  # where it is cut off
    sigma: float | None = None  # of the logarithm

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """ "200" (always), "100-400" (uniform) or "lognormal:200:0.6" (median, sigma; cut at 8 times the median)."""
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
            made = cls(int(match[1]), int(match[2] or match[1]))
        elif match := re.fullmatch(r"lognormal:(\d+):(\d+(?:\.\d+)?)", text):
            made = cls(int(match[1]), 8 * int(match[1]), float(match[2]))
        else:
            made = cls(0, 0)
        if 1 <= made.low <= made.high:
            return made
        raise SetupError(f'{text!r} is no length: "200", "100-400" or "lognormal:200:0.6" (median, sigma), in tokens')

    def draw(self, rng: random.Random) -> int:
        """A length in tokens."""
        if self.sigma is None:
            return rng.randint(int(self.low), int(self.high))
        return max(1, min(int(self.high), round(self.low * math.exp(rng.gauss(0, self.sigma)))))


@dataclass(frozen=True)
class TraceRow:
    """One arrival of a recorded load."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[TraceRow]:
    """The rows of a CSV file with the columns arrival (seconds), input and output (tokens). Raises SetupError."""
    try:
        with path.open(newline="") as file:
            rows = [TraceRow(float(r["arrival"]), int(r["input"]), int(r["output"])) for r in csv.DictReader(file)]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise SetupError(
            f"{path}: needs the columns arrival (seconds), input and output (tokens): {type(error).__name__}: {error}"
        ) from error
    if not rows or any(r.arrival_s < 0 or r.input_tokens < 1 or r.output_tokens < 1 for r in rows):
        raise SetupError(f"{path}: has no rows, or one with a negative arrival or a length below 1")
    return sorted(rows, key=lambda row: row.arrival_s)


@dataclass(frozen=True)
class Turn:
    """What the user says, and how long the answer may be."""

    text: str
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Turns that follow one another, each sent with all before it and their answers."""

    kind: str
    turns: tuple[Turn, ...]
    system: str = ""

    def opening(self) -> list[Message]:
        """The messages before the first turn."""
        return [{"role": "system", "content": self.system}] if self.system else []


# Input and output tokens a turn, where nothing else is asked for.
_LENGTHS = {
    "chat": (Lengths(50, 400, 0.6), Lengths(150, 600, 0.6)),
    "summarise": (Lengths(1500, 6000, 0.5), Lengths(120, 400, 0.4)),
    "code": (Lengths(350, 1500, 0.5), Lengths(250, 800, 0.5)),
    "agent": (Lengths(200, 1000, 0.6), Lengths(90, 300, 0.5)),
}
_TOPICS = (
    "growing tomatoes on a balcony", "the rules of chess", "a first job interview", "how vaccines work",
    "a week in Japan", "learning the guitar as an adult", "black holes", "a budget for a student",
    "keeping a sourdough starter alive", "the water cycle", "how to talk to a noisy neighbour", "the French Revolution",
    "training for a ten-kilometre run", "why bridges have gaps", "an old laptop that is slow", "compound interest",
    "a birthday party for a six-year-old", "plate tectonics", "writing a letter of complaint", "how a fridge works",
    "choosing a bicycle", "the history of paper", "sleeping badly", "recycling plastic", "a speech at a wedding",
)  # fmt: skip
_ASKS = (
    "Explain {topic} to a ten-year-old.", "What are the five most important things to know about {topic}?",
    "I am new to this: {topic}. Where should I begin?", "Write a short dialogue between two friends about {topic}.",
    "What do people usually get wrong about {topic}?", "Make a checklist for {topic}.",
    "Give me three different opinions on {topic}, each in a few sentences.",
    "Write an e-mail in which I ask for advice on {topic}.",
)  # fmt: skip
_SUMMARISE = (
    "Summarise the following text in three sentences.", "Give the main points of this text as a short list.",
    "What should a busy reader know from this? Answer in one paragraph.",
    "Write a headline and two sentences for this.",
)  # fmt: skip
_CODE = (
    "Add type hints and a docstring to this, and change nothing else.",
    "Rewrite this with clearer names. Give the whole code.",
    "Write pytest tests for this.", "Find a mistake in this, if there is one, and give the corrected code.",
    "Explain this line by line, then give a shorter version.",
)  # fmt: skip
# One for all agents, as in life: what a prefix cache is for.
_AGENT = (
    "You are an assistant that works on a repository with the tools read_file, search, edit_file and run_tests. Say in"
    " one sentence what you conclude from the last result, then name exactly one tool call with its arguments as JSON,"
    " for example {\"tool\": \"read_file\", \"path\": \"src/app.py\"}. Never invent a file's content. When everything"
    " that was asked for is done, answer with a summary of at most five lines instead of a call."
)  # fmt: skip
_GOALS = (
    "find out why the report is empty on Mondays", "make the importer skip lines it cannot read",
    "rename the settings that are hard to understand", "write the missing tests of the parser",
    "speed up the start", "find who still uses the old client",
)  # fmt: skip


@dataclass
class Prompts:
    """The conversations of a seed."""

    seed: int = 0
    input_tokens: Lengths | None = None  # instead of each kind's own
    output_tokens: Lengths | None = None
    trace: list[TraceRow] = field(default_factory=list)  # its lengths, in turn, instead of those
    chars_a_token: float = _CHARS_A_TOKEN
    context: int | None = None  # the model's, in tokens: longer conversations are made shorter

    def __post_init__(self) -> None:
        text = (FOLDER / "passages.txt").read_text()
        self._passages = [" ".join(passage.split()) for passage in text.split("\n\n")]
        self._code = (FOLDER / "code.txt").read_text().strip("\n").split("\n# ----\n")

    def conversation(self, kind: str, number: int) -> Conversation:
        """The `number`th conversation of a kind, or of a mixed load."""
        rng = random.Random(f"{self.seed}/{kind}/{number}")
        if kind == MIXED:
            kind = rng.choices(list(_MIX), list(_MIX.values()))[0]
        if self.trace:
            row = self.trace[number % len(self.trace)]
            turns, lengths = 1, [(row.input_tokens, row.output_tokens)]
        else:
            turns = rng.randint(3, 6) if kind == "agent" else 1
            given, answered = _LENGTHS[kind]
            given, answered = self.input_tokens or given, self.output_tokens or answered
            lengths = [(given.draw(rng), answered.draw(rng)) for _ in range(turns)]
        system = _AGENT if kind == "agent" and turns > 1 else ""
        made, room = [], self._room(system)
        for turn, (tokens, answer) in enumerate(lengths):
            answer = min(answer, max(1, room // 2))
            tokens = min(tokens, room - answer)
            room -= tokens + answer + 8  # of the template, each message
            if turn and room < 0:
                break
            made.append(Turn(self._text(kind, turn, int(tokens * self.chars_a_token), rng), answer))
        return Conversation(kind, tuple(made), system)

    def texts(self, chars: int) -> str:
        """The first `chars` characters of prose here."""
        return " ".join(self._passages)[:chars]

    def _room(self, system: str) -> int:
        """Tokens for the turns. A tenth is left over, as characters a token are an average."""
        return 1 << 30 if self.context is None else int(0.9 * self.context - len(system) / self.chars_a_token) - 40

    def _text(self, kind: str, turn: int, chars: int, rng: random.Random) -> str:
        """About `chars` characters; those of no two conversations begin alike."""
        label = f"{rng.randrange(10**5):05}"
        if kind == "chat":
            ask = rng.choice(_ASKS).format(topic=rng.choice(_TOPICS))
            return _sized(f"(Note {label}) {ask}", "What follows is what I know so far.", self._passages, chars, rng)
        if kind == "summarise":
            return _sized(f"Document {label}. {rng.choice(_SUMMARISE)}", "", self._passages, chars, rng)
        if kind == "code":
            return _sized(f"Ticket {label}. {rng.choice(_CODE)}", "", self._code, chars, rng)
        if turn == 0:
            return _sized(f"Task {label}: {rng.choice(_GOALS)}.", "Here is one of the files.", self._code, chars, rng)
        texts = self._code if rng.random() < 0.7 else self._passages
        return _sized(f"Result of call {label}:", "", texts, chars, rng)


def _sized(head: str, bridge: str, texts: list[str], chars: int, rng: random.Random) -> str:
    """`head`, then as much of texts drawn at random as makes `chars` characters, but never less than a line."""
    chars = max(chars, _MIN_CHARS)
    parts, length = [head], len(head)
    if length < chars and bridge:
        parts.append(bridge)
        length += len(bridge)
    while length < chars:
        for text in rng.sample(texts, len(texts)):
            parts.append(text[: chars - length])
            length += len(parts[-1]) + 2
            if length >= chars:
                break
    return "\n\n".join(part for part in parts if part)[:chars]
