"""What is in the dashboards and rules: their expressions, and the selectors in those."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).parent.parent
RULES = ROOT / "helm" / "rules" / "alerts.yaml"
DASHBOARDS = sorted((ROOT / "helm" / "dashboards").glob("*.json"))
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_NAMED = {"instance", "job", "le"}  # labels that are the scrape's, or a histogram's
Json = dict[str, Any]


def panels(dashboard: Json) -> list[Json]:
    """All panels, rows among them."""
    return [one for panel in dashboard["panels"] for one in (panel, *panel.get("panels", ()))]


def queries(dashboard: Json) -> Iterator[tuple[str, str]]:
    """(panel's title, expression)."""
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def filled(expression: str, window: str = "5m") -> str:
    """The expression as Grafana sends it, with all of each variable selected."""
    return _VARIABLE.sub(lambda found: window if "interval" in found[0] else ".*", expression)


def rules() -> list[Json]:
    """All alerts and recording rules."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Every selector in an expression. Raises ValueError where it does not parse."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return list({selector.prettify(): selector for selector in found}.values())


def own_labels(selector: promql_parser.VectorSelector) -> dict[str, str]:
    """The labels it selects by that are the metric's own, with their values."""
    return {m.name: m.value for m in selector.matchers.matchers if m.name not in _NAMED}


def family(name: str) -> str:
    """The metric a series is of."""
    return re.sub(r"_(bucket|sum|count)$", "", name)
