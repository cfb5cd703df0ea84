"""What the README states is what was measured, and what the code says."""

import json
import re
from pathlib import Path

from specdec.draft.drafters import DraftSession
from specdec.router.steps import Order

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_demos_figures_are_those_of_the_committed_run():
    (line,) = re.findall(r'^\{"ok": .*\}$', README, re.M)
    assert json.loads(line) == json.loads((ROOT / "results" / "demo-cpu.json").read_text())["result"]


def test_the_benchmarks_figures_are_those_of_the_committed_run():
    rows = json.loads((ROOT / "results" / "bench-cpu.json").read_text())["rows"]
    measured = {row["variant"]: (round(row["ratio"], 2), round(row["accept_length"] or 0, 2)) for row in rows}
    table = re.findall(r"^\| `(off|k = 4)` \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    assert len(table) == 2
    assert {name: (float(ratio), float(length)) for name, ratio, length in table}.items() <= measured.items()


def test_the_demo_heads_figures_are_those_of_the_committed_run():
    rows = {row["variant"]: row for row in json.loads((ROOT / "results" / "head-cpu.json").read_text())["rows"]}
    table = re.findall(r"^\| ([35]) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d. ]+) \|$", README, re.M)
    assert len(table) == 2
    for k, whole, code, summaries, stood in table:
        row = rows["k = 3, window 1" if k == "3" else "k = 5"]
        figures = [row["accept_length"], row["kinds"]["humaneval"], row["kinds"]["summary"]]
        assert [f"{x:.2f}" for x in figures] == [whole, code, summaries]
        assert " ".join(f"{x:.2f}" for x in row["stood"]) == stood


def test_the_routers_figures_are_those_of_the_committed_run():
    result = json.loads((ROOT / "results" / "edge-cpu.json").read_text())
    added, left, late = re.findall(r"router added ([\d.]+) ms .* left ([\d.]+) of .* at most ([\d.]+) ms late", README)[
        0
    ]
    measured = result["added_ttft_ms"], result["throughput"], result["lag_p99_ms"]
    assert (float(added), float(left), float(late)) == measured


def test_the_drafts_figures_are_those_of_the_committed_runs():
    runs = json.loads((ROOT / "results" / "draft-h200.json").read_text())["runs"]
    measured = {
        (run["command"].partition("--dtype ")[2].split()[0], row["batch"], row["context"]): (row["ms"], row["ratio"])
        for run in runs
        for row in run["rows"]
        if "--shape 1b" in run["command"] and row["k"] == 5
    }
    table = re.findall(r"^\| (bf16|fp8) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    assert len(table) == 4
    for weights, batch, context, ms, ratio in table:
        found = measured["bfloat16" if weights == "bf16" else weights, int(batch), int(context)]
        assert (round(found[0], 2), round(found[1], 2)) == (float(ms), float(ratio))


def test_the_heads_figures_are_those_of_the_committed_run():
    runs = json.loads((ROOT / "results" / "eagle3-h200.json").read_text())["runs"]
    (rows,) = (run["rows"] for run in runs if "eagle3-8b --dtype bfloat16" in run["command"])
    measured = {(row["batch"], row["k"]): (row["ms"], row["ratio"]) for row in rows if row["context"] == 512}
    table = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    assert len(table) == 3
    for batch, first, five, ratio in table:
        assert round(measured[int(batch), 1][0], 2) == float(first)
        assert tuple(round(x, 2) for x in measured[int(batch), 5]) == (float(five), float(ratio))


def test_the_drafter_and_the_policy_in_it_run():
    scope: dict[str, type] = {}
    for block in blocks("python"):
        if "class Repeat" in block or "class EveryOther" in block:
            exec(block, scope)
    assert scope["Repeat"]().propose([DraftSession(1, 1, [5, 6])], [3]) == [[6, 6, 6]]
    policy = scope["EveryOther"](4, 8, 2)

    class Bare:
        cycles = 1

    assert policy.order(Bare()) == Order(4, 2)


def test_every_file_it_names_is_there():
    for path in re.findall(r"`((?:services|tools|tests)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
