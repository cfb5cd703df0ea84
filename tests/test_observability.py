"""A real Prometheus and a real Alertmanager on the real stack; and one trace from a client to the draft."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml

from dashboard_kit import DASHBOARDS, RULES, filled, queries, rules, selectors
from engine_prompts import arrange
from fake_collector import FakeCollector, answering
from specdec.client import stream_chat
from specdec.stack import CPU_ENVIRONMENT, Service, Stack, free_ports
from specdec.telemetry import METRICS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("prometheus-alertmanager")),
        reason="prometheus and prometheus-alertmanager are not installed",
    ),
]
MODEL = "demo"
T = TypeVar("T")
WITH_WEIGHTS = {  # what only a drafter of this kind counts, and the n-gram one does not
    *("specdec_draft_evicted_sessions_total", "specdec_draft_missing_states_total", "specdec_draft_run_ahead_total"),
    *("specdec_draft_run_ahead_waited_total", "specdec_draft_run_ahead_saved_seconds_total"),
    "specdec_draft_read_ahead_tokens_total",
}
QUIET = {"Refused by the router, by code"}  # shows nothing as long as all is well; the rest must show something


def until(met: Callable[[], T], timeout_s: float = 20, every_s: float = 0.1) -> T:
    """Waits for `met()` to be true and returns what it was."""
    end = time.monotonic() + timeout_s
    while not (value := met()):
        assert time.monotonic() < end, f"still not so after {timeout_s} s"
        time.sleep(every_s)
    return value


@dataclass
class Watching:
    """A Prometheus that scrapes a stack every second, and what its Alertmanager has sent on."""

    url: str
    alerts: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, query: str) -> list[dict[str, Any]]:
        """An instant query's series. Fails where Prometheus refuses it."""
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        answer = httpx.get(address, timeout=10, trust_env=False).json()
        assert answer["status"] == "success", f"{query}: {answer}"
        return list(answer["data"]["result"])

    def values(self, query: str) -> list[float]:
        """Their values, those that are no numbers left out."""
        values = [float(series["value"][1]) for series in self.ask(query)]
        return [value for value in values if not math.isnan(value)]

    def told(self, alert: str, status: str) -> dict[str, Any] | None:
        """The webhook's newest news of an alert, if it says so."""
        news = [one for one in self.alerts if one["labels"]["alertname"] == alert]
        return news[-1] if news and news[-1]["status"] == status else None


def shortened(rules: str) -> str:
    """The rules, with no alert waiting longer than a second."""
    return re.sub(r"^( +for:) \S+$", r"\1 1s", rules, flags=re.M)


@pytest.fixture(scope="module")
def watching(engine_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    """Both as real processes, with the shipped rules."""
    folder = tmp_path_factory.mktemp("watching")
    prometheus, alertmanager = free_ports(2)
    seen = Watching(f"http://127.0.0.1:{prometheus}")
    stack = engine_stack
    targets = {
        "router": stack.admin_url,
        "verifier": stack.verifier_url,
        "draft": stack.draft_url,
        "vllm": stack.vllm_url,
    }
    (folder / "alerts.yaml").write_text(shortened(RULES.read_text()))
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": ["alerts.yaml"],
                "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
                "scrape_configs": [
                    {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
                    for job, url in targets.items()
                ],
            }
        )
    )

    def note(body: bytes) -> None:
        seen.alerts += json.loads(body)["alerts"]

    with answering(note) as webhook:
        route = {"receiver": "test", "group_by": ["alertname"], "group_wait": "0s", "group_interval": "1s"}
        receiver = {"name": "test", "webhook_configs": [{"url": f"http://127.0.0.1:{webhook}/"}]}
        (folder / "alertmanager.yaml").write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}))
        commands = {
            "alertmanager": [
                *("prometheus-alertmanager", f"--config.file={folder}/alertmanager.yaml"),
                *(f"--storage.path={folder}/alertmanager", f"--web.listen-address=127.0.0.1:{alertmanager}"),
                "--cluster.listen-address=",
            ],
            "prometheus": [
                *("prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb"),
                f"--web.listen-address=127.0.0.1:{prometheus}",
            ],
        }
        running = []
        try:
            for name, command in commands.items():
                ready = f"http://127.0.0.1:{prometheus if name == 'prometheus' else alertmanager}/-/ready"
                running.append(Service(name, command, ready, folder / f"{name}.log", os.environ))
            for service in running:
                service.wait_ready(30)
            yield seen
        finally:
            for service in reversed(running):
                service.process.stop()


def chat(url: str, number: int, tokens: int = 40) -> int:
    """One streamed answer to what n-gram drafts find much in; returns its tokens."""
    prompt = f"Say this again, {number} times: " + "red, green, blue, " * 6
    *_, (_, _, answer) = stream_chat(url, MODEL, prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
    return int(answer.completion_tokens)


def run_ahead_draft(stack: Stack, model: Path, log: Path) -> None:
    """Makes the target its own draft, which also runs ahead."""
    assert stack.draft is not None
    stack.draft.process.stop()
    port = stack.draft_url.rpartition(":")[2]
    command = [sys.executable, "-m", "specdec", "draft", "--pair", stack.pair, "--health-port", port]
    command += ["--drafter", "causal", "--model", str(model), "--run-ahead", "on"]
    stack.draft = Service("draft", command, stack.draft_url + "/readyz", log, {**CPU_ENVIRONMENT, **os.environ})


def test_every_panel_and_alert_shows_the_load_and_a_dead_draft_reaches_the_webhook(
    engine_stack: Stack, watching: Watching, model: Path, tmp_path: Path
):
    stack = engine_stack
    run_ahead_draft(stack, model, tmp_path / "draft.log")
    stack.start_router()
    stack.wait_ready()
    assert chat(stack.url, 1) == 40
    stack.start_draft("ngram")
    stack.wait_ready()
    assert stack.draft is not None

    # a short load: streams, a whole answer, a refusal, and a client that goes
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(chat, stack.url, number) for number in range(2, 8)]
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 8}
        assert httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
        refused = httpx.post(f"{stack.url}/v1/completions", json=body | {"model": "nobody"}, trust_env=False)
        assert refused.status_code == 404
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=body | {"stream": True}, trust_env=False) as one:
            next(one.iter_bytes())
        assert sum(answer.result() for answer in answers) == 6 * 40
    until(lambda: watching.values("sum(specdec_sessions) == 0"))
    time.sleep(1.2)  # the last scrape of the load

    # each service's scrape has the table's names, and no others
    for service, url in (("router", stack.admin_url), ("verifier", stack.verifier_url), ("draft", stack.draft_url)):
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        names = set(re.findall(r"^# TYPE (specdec_\w+) ", text, re.M))
        assert names == {entry.name for entry in METRICS[service]} - WITH_WEIGHTS

    # what happened is what is counted
    totals = 'sum by (outcome) (specdec_router_outcomes_total{route=~"/v1/(chat/)?completions"}) > 0'
    outcomes = {one["metric"]["outcome"]: float(one["value"][1]) for one in watching.ask(totals)}
    assert outcomes == {"length": 8, "refused": 1, "abort": 1}
    assert 7 * 40 + 8 <= watching.values("sum(specdec_router_tokens_total)")[0] <= 7 * 40 + 16

    # every panel has something to show
    blank = []
    for path in DASHBOARDS:
        for title, expression in queries(json.loads(path.read_text())):
            found = watching.values(filled(expression, "60s"))
            if not found and title not in QUIET and "loop_lag" not in expression:
                blank.append(f"{path.stem}, {title}: {expression}")
    assert not blank, "\n".join(blank)

    # every alert's expression is one, asks for what exists, and no alert fires
    for rule in rules():
        watching.ask(rule["expr"])
        for selector in selectors(rule["expr"]):
            assert watching.ask(selector.prettify()), f"{rule}: nothing for {selector.prettify()}"
    firing = watching.values('count(ALERTS{alertstate="firing", alertname!="SpecdecSlowerThanPlain"})')
    assert not firing, watching.ask('ALERTS{alertstate="firing"}')

    # the draft dies: somebody is told; it comes back: they are told that too
    killed = time.monotonic()
    os.killpg(stack.draft.process.pid, signal.SIGKILL)
    alert = until(lambda: watching.told("SpecdecDraftDown", "firing"), 30)
    assert alert["labels"]["instance"] == stack.verifier_url.removeprefix("http://")
    assert "no draft" in alert["annotations"]["summary"]
    print(f"from the kill to the webhook: {time.monotonic() - killed:.1f} s")
    assert chat(stack.url, 3, tokens=8) == 8
    stack.start_draft("ngram")
    until(lambda: watching.told("SpecdecDraftDown", "resolved"), 30)


def test_several_routers_add_up(engine_stack: Stack):
    """Each is a target of its own; together they have counted what was asked, and the pair what they delivered."""
    engine_stack.start_router()
    engine_stack.wait_ready()
    urls = [engine_stack.url, engine_stack.add_router()]
    admins = [engine_stack.admin_url, engine_stack.more_admin_urls[-1]]

    def counted(url: str, name: str, **labels: str) -> float:
        text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
        wanted = "".join(f'(?=[^}}]*{label}="{re.escape(value)}")' for label, value in labels.items())
        found = re.findall(rf"^{name}(?:\{{{wanted}[^}}]*\}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    before = counted(engine_stack.verifier_url, "specdec_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        tokens = sum(pool.map(lambda number: chat(urls[number % 2], number, 16), range(8)))
    ended = [counted(url, "specdec_router_outcomes_total", outcome="length") for url in admins]
    assert ended == [4, 4]
    until(lambda: sum(counted(url, "specdec_router_tokens_total") for url in admins) == tokens == 8 * 16)
    until(lambda: counted(engine_stack.verifier_url, "specdec_tokens_total") - before == tokens)
    assert [counted(url, "specdec_router_requests_in_flight") for url in admins] == [0, 0]


# ---- traces


def test_one_trace_from_the_client_to_the_draft(engine_stack: Stack, collector: FakeCollector):
    arrange(engine_stack, "ngram")
    caller, secret = "0af7651916cd43dd8448eb211c80319c", "7, 5, 3, 7, 5, 3, 7, 5,"
    response = httpx.post(
        f"{engine_stack.url}/v1/completions",
        json={"model": MODEL, "prompt": secret, "max_tokens": 24, "temperature": 0},
        headers={"traceparent": f"00-{caller}-b7ad6b7169203331-01"},
        timeout=60,
        trust_env=False,
    )
    assert response.status_code == 200

    def spans(service: str) -> list[Any]:
        return collector.spans(caller).get(service, [])

    until(lambda: spans("specdec-verifier"))
    until(lambda: any(span.name == "POST /v1/completions" for span in spans("specdec-router")))
    router = {span.name: span for span in spans("specdec-router")}
    root = router["POST /v1/completions"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert {"admission", "engine queue", "cycle", "draft", "verify"} <= set(router)
    assert router["draft"].parent_span_id in {s.span_id for s in spans("specdec-router") if s.name == "cycle"}
    assert root.span_id in {span.parent_span_id for span in spans("specdec-verifier")}
    assert engine_stack.router is not None
    lines = [line for line in engine_stack.router.log.read_text().splitlines() if caller in line]
    (done,) = [json.loads(line) for line in lines if '"outcome"' in line]
    assert (done["outcome"], done["trace_id"], done["service"]) == ("length", caller, "router")
    assert done["request_id"].startswith("specdec-")
    for log in engine_stack.router.log.parent.glob("*.log"):
        assert secret not in log.read_text()
