"""The way into what the chart deploys: ingress and network policies."""

import re

import yaml

import kube_schemas
from chart_kit import (
    CHART,
    render,
    selects,
)
from chart_services import (
    router_settings,
)

META = yaml.safe_load((CHART / "Chart.yaml").read_text())
OLDEST = re.search(r"1\.\d+", META["kubeVersion"])[0]
NEWEST = kube_schemas.versions()[-1]


def test_the_ingress_lets_streams_and_long_requests_live() -> None:
    values = {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["llm.example.org", "llm.example.com"],
            "tls": [{"secretName": "llm-tls", "hosts": ["llm.example.org"]}],
            "annotations": {"cert-manager.io/cluster-issuer": "letsencrypt"},
        },
        "router": {"readTimeoutSeconds": 1800, "maxBodyMb": 48.5},
    }
    rendered = render(values=values)
    ingress, router = rendered.one("Ingress"), router_settings(rendered.pod_with("router"))
    notes = ingress["metadata"]["annotations"]
    nginx = {k.removeprefix("nginx.ingress.kubernetes.io/"): v for k, v in notes.items() if k.startswith("nginx")}
    assert (nginx["proxy-buffering"], nginx["proxy-request-buffering"], nginx["proxy-http-version"]) == (
        "off",
        "off",
        "1.1",
    )
    assert float(nginx["proxy-read-timeout"]) >= router.read_timeout_s == 1800
    assert float(nginx["proxy-send-timeout"]) >= router.keepalive_s
    size = re.fullmatch(r"(\d+)m", nginx["proxy-body-size"])
    assert size, "in whole units"
    assert int(size[1]) >= router.max_body_mb == 48.5
    assert notes["cert-manager.io/cluster-issuer"] == "letsencrypt"
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == values["ingress"]["hosts"]
    assert ingress["spec"]["tls"] == values["ingress"]["tls"]
    assert kube_schemas.faults(ingress, OLDEST) == kube_schemas.faults(ingress, NEWEST) == []


def test_every_rule_of_the_ingress_leads_to_the_router() -> None:
    rendered = render(values={"ingress": {"enabled": True}})
    services = {service["metadata"]["name"]: service for service in rendered.of("Service")}
    (rule,) = rendered.one("Ingress")["spec"]["rules"]
    assert "host" not in rule
    assert "ingressClassName" not in rendered.one("Ingress")["spec"]
    for path in rule["http"]["paths"]:
        backend = path["backend"]["service"]
        service = services[backend["name"]]
        assert backend["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]
        assert selects(service["spec"]["selector"], rendered.pod_with("router").labels)
        target = next(
            port["targetPort"] for port in service["spec"]["ports"] if port["name"] == backend["port"]["name"]
        )
        assert rendered.pod_with("router").ports()[target] == router_settings(rendered.pod_with("router")).port
    assert not render().of("Ingress")


def test_a_user_s_annotation_stands_above_the_chart_s() -> None:
    name = "nginx.ingress.kubernetes.io/proxy-read-timeout"
    rendered = render(values={"ingress": {"enabled": True, "annotations": {name: "7200"}}})
    assert rendered.one("Ingress")["metadata"]["annotations"][name] == "7200"


def test_only_routers_reach_the_engine_s_api() -> None:
    """vLLM's own port asks for no key."""
    rendered = render()
    engine, router = rendered.pod_with("verifier"), rendered.pod_with("router")
    policy = next(
        p for p in rendered.of("NetworkPolicy") if selects(p["spec"]["podSelector"]["matchLabels"], engine.labels)
    )
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    closed = {"vllm", "control"}
    for rule in policy["spec"]["ingress"]:
        ports = {port["port"] for port in rule["ports"]}
        if ports & closed:
            assert ports <= closed
            (peer,) = rule["from"]
            assert peer.keys() == {"podSelector"}
            assert selects(peer["podSelector"]["matchLabels"], router.labels)
            assert not selects(peer["podSelector"]["matchLabels"], engine.labels)
        else:
            assert ports == {"health", "draft-health"}
    assert not render(values={"networkPolicy": {"enabled": False}}).of("NetworkPolicy")


def test_clients_can_be_named_and_the_chart_s_own_test_stays_one() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}]
    rendered = render(values={"networkPolicy": {"clients": clients, "metrics": clients}})
    router = rendered.pod_with("router")
    hook = next(pod for pod in rendered.pods() if pod.is_hook)
    policy = next(
        p for p in rendered.of("NetworkPolicy") if selects(p["spec"]["podSelector"]["matchLabels"], router.labels)
    )
    rules = {port["port"]: rule["from"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert rules["metrics"] == clients
    assert rules["http"][0] == clients[0]
    assert any(selects(peer.get("podSelector", {}).get("matchLabels", {}), hook.labels) for peer in rules["http"])
