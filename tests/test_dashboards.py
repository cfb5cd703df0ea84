"""helm/dashboards and helm/rules: their form, what they ask for, and each alert by `promtool test rules`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboard_kit import DASHBOARDS, ROOT, RULES, family, filled, own_labels, panels, queries, rules, selectors
from specdec.telemetry import METRICS

sys.path.insert(0, str(ROOT / "tools"))
import dashboards
import metrics_doc

RULE_TESTS = ROOT / "tests" / "rules" / "alerts_test.yaml"
TABLE = {entry.name: entry for table in METRICS.values() for entry in table}
LOADED = {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}
EXPRESSIONS = [
    *((name, title, filled(expression)) for name, loaded in LOADED.items() for title, expression in queries(loaded)),
    *(("rules", rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
]
each_dashboard = pytest.mark.parametrize("loaded", LOADED.values(), ids=LOADED)


def test_the_files_are_what_the_tool_writes():
    assert LOADED == dashboards.DASHBOARDS, "run tools/dashboards.py"
    assert set(LOADED) == {"speculation", "service"}


def test_uids_and_ids_are_unique():
    uids = [loaded["uid"] for loaded in LOADED.values()]
    assert len(uids) == len(set(uids))
    for loaded in LOADED.values():
        ids = [panel["id"] for panel in panels(loaded)]
        assert len(ids) == len(set(ids))


@each_dashboard
def test_the_data_source_is_a_variable_and_nothing_is_an_input(loaded: dict[str, Any]):
    text = json.dumps(loaded)
    assert "__inputs" not in text
    assert "DS_PROMETHEUS" not in text
    holders = [*panels(loaded), *(target for panel in panels(loaded) for target in panel.get("targets", ()))]
    holders += loaded["templating"]["list"]
    sources = [holder["datasource"] for holder in holders if "datasource" in holder]
    assert len(sources) > len(panels(loaded))
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert loaded["templating"]["list"][0]["type"] == "datasource"
    known = {variable["name"] for variable in loaded["templating"]["list"]}
    for _, expression in queries(loaded):
        used = set(re.findall(r"\$\{?(\w+)", expression)) - {"__rate_interval"}
        assert used <= known


@each_dashboard
def test_panels_have_a_unit_a_description_and_a_place_of_their_own(loaded: dict[str, Any]):
    places: set[tuple[int, int]] = set()
    for panel in panels(loaded):
        grid = panel["gridPos"]
        taken = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not taken & places
        assert max(x for x, _ in taken) < 24
        places |= taken
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["description"].endswith(".")
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@each_dashboard
def test_no_names_are_written_in(loaded: dict[str, Any]):
    for _, expression in queries(loaded):
        for selector in selectors(filled(expression)):
            assert {m.name: m.value for m in selector.matchers.matchers}.get("instance") == ".*"
        assert not re.search(r"\blocalhost\b|:\d{4}|(?:job|namespace|pod)=", expression)


@pytest.mark.parametrize(("where", "title", "expression"), EXPRESSIONS)
def test_what_is_asked_for_exists(where: str, title: str, expression: str):
    """Each metric in the table, each label its own, each label's value among those listed."""
    for selector in selectors(expression):
        name = selector.name
        if name.startswith(("vllm:", "process_")):
            assert name.startswith("process_") or f"`{name}`" in metrics_doc.document()
            continue
        if name.startswith("specdec:"):
            assert name in {rule.get("record") for rule in rules()}
            continue
        entry = TABLE[family(name)]
        assert (entry.kind == "histogram") == (family(name) != name)
        for label, value in own_labels(selector).items():
            allowed = entry.labels[label]
            if isinstance(allowed, tuple):
                assert any(re.fullmatch(value, one) for one in allowed)
                assert all(one in allowed for one in value.split("|") if re.fullmatch(r"\w+", one))


@pytest.mark.parametrize(
    "expression", ["sum(rate(specdec_tokens_total[5m])", "rate(specdec_tokens_total)", "sum by (le rate(x[1m]))"]
)
def test_what_does_not_parse_is_seen(expression: str):
    with pytest.raises(ValueError, match=r".+"):
        selectors(expression)


# ---- rules

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def run_promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)


@promtool
def test_the_rules_are_valid():
    done = run_promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_alerts_fire_when_they_must_and_only_then():
    done = run_promtool("test", "rules", RULE_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_named_in_the_tests_with_a_case_that_fires():
    cases = [case for test in yaml.safe_load(RULE_TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    firing = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert firing == {rule["alert"] for rule in rules() if "alert" in rule}


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}
            assert "for" in rule


MUTANTS = [
    ("> 0\n          and on (job, instance) rate", ">= 0\n          and on (job, instance) rate"),
    ("rate(specdec_router_verdicts_total[5m]) > 0", "rate(specdec_router_verdicts_total[5m]) >= 0"),
    ("< 0.97", "< 0.8"),
    ("< 0.5 *", "< 5 *"),
    ('position="1"}[10m])) > 0.1', 'position="1"}[10m])) > 0'),
    ("max by (pair)", "min by (pair)"),
    (" and specdec_router_pair_ready == 1", ""),
    ('{outcome!~"refused|abort"}[5m]', "[5m]"),
    ("min_over_time(specdec_router_waiting_sessions", "max_over_time(specdec_router_waiting_sessions"),
    ('{code=~"too_many_waiting|queue_timeout"}', ""),
    ("for: 2m\n        labels:\n          severity: warning", "for: 0s\n        labels:\n          severity: warning"),
]


@promtool
@pytest.mark.parametrize(("right", "wrong"), MUTANTS)
def test_a_wrong_rule_fails_its_test(tmp_path: Path, right: str, wrong: str):
    text = RULES.read_text()
    assert right in text
    (tmp_path / "alerts.yaml").write_text(text.replace(right, wrong))
    tests = RULE_TESTS.read_text().replace("../../helm/rules/alerts.yaml", "alerts.yaml")
    (tmp_path / "test.yaml").write_text(tests)
    assert run_promtool("test", "rules", tmp_path / "test.yaml").returncode == 1
