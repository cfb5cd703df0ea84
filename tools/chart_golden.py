"""Writes helm/examples/golden/, what the chart renders for its defaults and each example; with --check it only says
where that is not what is there. A change of the chart is then seen as what it changes in a cluster."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import chart_tools

CHART = Path(__file__).parent.parent / "helm"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
GOLDEN = CHART / "examples" / "golden"
DEFAULTS = "defaults"
NAMESPACE = "models"
# What a cluster with the Prometheus operator says it has.
MONITORING = tuple(
    f"monitoring.coreos.com/v1{kind}" for kind in ("", "/ServiceMonitor", "/PodMonitor", "/PrometheusRule")
)
KUBERNETES = "1.34.0"  # the first with resource.k8s.io/v1


def golden() -> dict[Path, str]:
    """Each golden file and what it should say. Raises SystemExit with helm's words where the chart does not render."""
    texts = {GOLDEN / f"{DEFAULTS}.yaml": _render()}
    return texts | {GOLDEN / example.name: _render("-f", example) for example in EXAMPLES}


def stale() -> list[Path]:
    """Files that differ, are missing, or have no example any more."""
    texts = golden()
    written = set(GOLDEN.glob("*.yaml"))
    differ = {path for path, text in texts.items() if path not in written or path.read_text() != text}
    return sorted(differ | (written - texts.keys()))


def _render(*arguments: str | Path) -> str:
    apis = ",".join(MONITORING)
    target = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES, "--api-versions", apis)
    done = chart_tools.helm("template", "specdec", CHART, *target, *arguments)
    if done.returncode:
        raise SystemExit(f"helm template {' '.join(map(str, arguments))}: {done.stderr}")
    return "\n---\n".join(map(_masked, done.stdout.split("\n---\n")))


def _masked(document: str) -> str:
    """Without the chart's own secrets, which are new each time, and the dashboards, which are files beside it."""
    head, data, values = document.partition("\ndata:\n")
    if "\nkind: Secret\n" in head:
        return head + data + re.sub(r": \S+$", ": MADE-AT-INSTALL", values, flags=re.MULTILINE)
    if board := re.match(r"  (\S+\.json): ", values):
        return f"{head}{data}  {board[1]}: AS-IN-dashboards/{board[1]}\n"
    return document


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for path in (paths := stale()):
            print(
                f"{path.relative_to(CHART.parent)} is not what the chart renders: run make chart-golden",
                file=sys.stderr,
            )
        return 1 if paths else 0
    GOLDEN.mkdir(parents=True, exist_ok=True)
    texts = golden()
    for path in set(GOLDEN.glob("*.yaml")) - texts.keys():
        path.unlink()
    for path, text in texts.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
