"""The chart's monitors, rules and dashboards."""

import json

import yaml

import kube_schemas
from chart_kit import (
    CHART,
    chart_golden,
    each_case,
    name_of,
    render,
    selects,
)
from chart_services import (
    router_settings,
    settings_of,
    verifier_settings,
)
from specdec.telemetry import METRICS


@each_case
def test_every_monitor_finds_a_service_a_port_and_all_that_has_metrics(case: str) -> None:
    rendered = render(case)
    scraped = set()
    for monitor in rendered.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [s for s in rendered.of("Service") if selects(wanted, s["metadata"]["labels"])]
        assert len(services) == 1, f"{name_of(monitor)}: {list(map(name_of, services))} would be scraped twice"
        ports = {port["name"]: port["targetPort"] for port in services[0]["spec"]["ports"]}
        (pod,) = [pod for pod in rendered.pods() if selects(services[0]["spec"]["selector"], pod.labels)]
        targets = [
            (
                e["port"],
                {r["targetLabel"]: r["replacement"] for r in e.get("relabelings", ())}.get("endpoint", e["port"]),
            )
            for e in monitor["spec"]["endpoints"]
        ]
        assert len(targets) == len(set(targets)), "series of two targets with the same labels would be one"
        for endpoint in monitor["spec"]["endpoints"]:
            scraped.add((pod.ports()[ports[endpoint["port"]]], endpoint.get("path", "/metrics")))
    router, engine = rendered.pod_with("router"), rendered.pod_with("verifier")
    expected = {router_settings(router).admin_port, verifier_settings(engine).health_port}
    if "draft" in [c["name"] for c in engine.containers]:
        expected.add(settings_of(engine, engine.container("draft")).health_port)
    assert {port for port, path in scraped if path == "/metrics"} == expected
    assert [path for _, path in scraped if path != "/metrics"] == ["/vllm/metrics"], "vLLM's own"


def test_no_metric_has_a_label_that_the_scrape_sets() -> None:
    """It would be renamed to exported_*, and no query would find it."""
    set_by_the_scrape = {"job", "instance", "namespace", "pod", "container", "service", "endpoint"}
    for table in METRICS.values():
        for entry in table:
            assert not set_by_the_scrape & set(entry.labels), entry.name


def test_monitors_carry_the_labels_that_prometheus_selects_by() -> None:
    label = {"release": "kube-prometheus-stack"}
    values = {"monitoring": {"serviceMonitor": {"labels": label, "interval": "30s"}, "rules": {"labels": label}}}
    rendered = render(values=values)
    for manifest in (*rendered.of("ServiceMonitor"), rendered.one("PrometheusRule")):
        assert selects(label, manifest["metadata"]["labels"]), name_of(manifest)
    monitors = rendered.of("ServiceMonitor")
    assert {endpoint["interval"] for m in monitors for endpoint in m["spec"]["endpoints"]} == {"30s"}


def test_monitors_are_made_where_the_cluster_has_them_or_they_are_asked_for() -> None:
    kinds = ("ServiceMonitor", "PrometheusRule")
    assert all(render().of(kind) for kind in kinds)
    assert not any(render(apis=()).of(kind) for kind in kinds)
    for enabled in (True, False):
        forced = {"monitoring": {"serviceMonitor": {"enabled": enabled}, "rules": {"enabled": enabled}}}
        for apis in ((), chart_golden.MONITORING):
            assert all(bool(render(values=forced, apis=apis).of(kind)) is enabled for kind in kinds)


def test_the_rules_are_those_of_the_file() -> None:
    rule = render().one("PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "rules" / "alerts.yaml").read_text())
    assert "{{ $labels.pair }}" in json.dumps(rule["spec"])
    assert kube_schemas.faults(rule, "1.34") == []


def test_the_dashboards_are_those_of_the_files_under_the_sidecar_s_label() -> None:
    files = {path.name: path.read_bytes() for path in (CHART / "dashboards").glob("*.json")}
    assert len(files) == 2
    found = {}
    for manifest in render().of("ConfigMap"):
        if manifest["metadata"]["labels"].get("grafana_dashboard") == "1":
            assert len(json.dumps(manifest)) < 2**20, "etcd takes no more"
            found |= {name: text.encode() for name, text in manifest["data"].items()}
    assert found == files, "byte for byte"
    assert any(b"{{" in text for text in found.values()), "legends"


def test_the_dashboards_go_where_the_sidecar_looks_or_nowhere() -> None:
    options = {"label": "my_boards", "labelValue": "yes", "namespace": "grafana", "annotations": {"folder": "LLM"}}
    boards = [m for m in render(values={"monitoring": {"dashboards": options}}).of("ConfigMap") if "data" in m]
    boards = [m for m in boards if any(name.endswith(".json") for name in m["data"])]
    assert len(boards) == 2
    for board in boards:
        metadata = board["metadata"]
        assert (metadata["namespace"], metadata["labels"]["my_boards"]) == ("grafana", "yes")
        assert metadata["annotations"] == {"folder": "LLM"}
    without = render(values={"monitoring": {"dashboards": {"enabled": False}}})
    assert not [m for m in without.of("ConfigMap") if any(name.endswith(".json") for name in m["data"])]
