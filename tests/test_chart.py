"""The chart as `helm template` renders it: valid, joined up, and what the services can be started with.

No cluster is here. test_chart_fake_kube.py has the real helm against a fake API."""

import ast
import base64
import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube_schemas
from chart_kit import (
    CASES,
    CHART,
    DEFAULTS,
    NAMESPACE,
    POD_IP,
    Pod,
    Rendered,
    arguments,
    chart_golden,
    chart_tools,
    environment,
    quantity,
    refusal,
    render,
    selects,
    walk,
)
from specdec.check import CheckSettings
from specdec.cli import split_extra
from specdec.draft.settings import DraftSettings
from specdec.errors import SpecdecError
from specdec.router.settings import RouterSettings
from specdec.settings import Settings
from specdec.telemetry import METRICS
from specdec.verifier.settings import VerifierSettings
from specdec.verifier.supervisor import engine_command

if chart_tools.missing():
    pytest.skip("helm is not installed: run `make chart` once", allow_module_level=True)

Json = dict[str, Any]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
META = yaml.safe_load((CHART / "Chart.yaml").read_text())
OLDEST = re.search(r"1\.\d+", META["kubeVersion"])[0]
NEWEST = kube_schemas.versions()[-1]
COMMANDS: dict[str, type[Settings]] = {
    "router": RouterSettings,
    "verifier": VerifierSettings,
    "draft": DraftSettings,
    "check": CheckSettings,
}
each_case = pytest.mark.parametrize("case", CASES)
each_helm = pytest.mark.parametrize("helm", list(chart_tools.HELMS))


# ---- it renders, and to what


@each_helm
@each_case
def test_helm_lint_is_content(case: str, helm: str) -> None:
    files = () if case == DEFAULTS else ("-f", CHART / "examples" / f"{case}.yaml")
    done = chart_tools.helm("lint", "--strict", "--kube-version", "1.34.0", CHART, *files, version=helm)
    assert done.returncode == 0, done.stdout + done.stderr


@each_case
def test_an_older_helm_renders_the_same(case: str) -> None:
    older = next(version for version in chart_tools.HELMS if version != chart_tools.HELM)
    assert settled(render(case, helm=older)) == settled(render(case))


@pytest.mark.parametrize("kubernetes", [OLDEST, "1.34", NEWEST])
@each_case
def test_every_manifest_is_valid(case: str, kubernetes: str) -> None:
    if uses_dra(render(case)) and kubernetes == OLDEST:
        assert "1.34" in refusal(case, kubernetes=kubernetes)
        return
    rendered = render(case, kubernetes=kubernetes)
    assert rendered
    for manifest in rendered:
        assert kube_schemas.faults(manifest, kubernetes) == [], name_of(manifest)


def test_a_fault_would_be_seen() -> None:
    """The control of the test above."""
    rendered = render()
    for kind, path in (("Deployment", ("spec",)), ("Service", ("spec",)), ("ServiceMonitor", ("spec", "endpoints", 0))):
        manifest = copy.deepcopy(rendered.of(kind)[0])
        node = manifest
        for key in path:
            node = node[key]
        node["replicaz"] = 1
        assert "replicaz" in str(kube_schemas.faults(manifest, "1.34")), kind
    rule = copy.deepcopy(rendered.one("PrometheusRule"))
    rule["spec"]["groups"][0]["rules"][0]["for"] = "soon"
    assert "soon" in str(kube_schemas.faults(rule, "1.34"))
    for unknown in ("apps/v1 Deploymint", "apps/v7 Deployment", "monitoring.coreos.com/v1 ServiceMonitors"):
        api_version, kind = unknown.split()
        with pytest.raises(kube_schemas.UnknownKind, match=kind):
            kube_schemas.faults({"apiVersion": api_version, "kind": kind}, "1.34")
    with pytest.raises(kube_schemas.UnknownKind):  # came with 1.34
        kube_schemas.faults({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}, "1.33")


@each_case
def test_nothing_is_null_or_left_unfilled(case: str) -> None:
    for manifest in render(case):
        for path, value in walk(manifest):
            assert value is not None, f"{name_of(manifest)}{path}"
            if isinstance(value, str) and manifest["kind"] != "ConfigMap":
                assert "<no value>" not in value, f"{name_of(manifest)}{path}"
                assert "map[" not in value, f"{name_of(manifest)}{path}"


def test_the_golden_files_are_what_the_chart_renders() -> None:
    assert chart_golden.stale() == [], "look at what changed, then run make chart-golden"


@each_case
def test_names_are_unique_and_in_the_release_s_namespace(case: str) -> None:
    rendered = render(case)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered]
    assert len(names) == len(set(names))
    assert {manifest["metadata"].get("namespace", NAMESPACE) for manifest in rendered} == {NAMESPACE}


def test_the_longest_release_name_leaves_valid_names() -> None:
    longest = "r" * 53  # helm's own limit
    rendered = render(
        release=longest, values={"ingress": {"enabled": True}, "router": {"autoscaling": {"enabled": True}}}
    )
    for manifest in rendered:
        # A StatefulSet's pods carry a label of its name and eleven more characters.
        limit = 52 if manifest["kind"] == "StatefulSet" else 63
        assert len(manifest["metadata"]["name"]) <= limit, name_of(manifest)
        for path, value in walk(manifest):
            if ".labels." in path or ".matchLabels." in path:
                assert len(value) <= 63, f"{name_of(manifest)}{path}"
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered]
    assert len(names) == len(set(names))


def test_a_value_that_is_taken_away_is_missed_by_name() -> None:
    """A section whose lines are all commented out is null, which takes the defaults out, too."""
    places = [path for path, value in walk(VALUES) if path and (is_section(path, value) or is_leaf(path, value))]
    deepest = [path for path in places if not any(other.startswith(f"{path}.") for other in places)]
    said = refusal(values=nested(dict.fromkeys(deepest)))
    for path in deepest:
        section, _, name = path.rpartition(".")
        assert re.search(rf"at '{pointer(section)}': missing propert[^-]*'{name}'", said), f"{path}: {said}"
    sections = [name for name, value in VALUES.items() if isinstance(value, dict)]
    said = refusal(values=dict.fromkeys(sections))
    assert all(f"'{name}'" in said for name in sections), said


@pytest.mark.parametrize("release", ["on", "true", "null"])
def test_a_release_named_like_a_constant_stays_a_string(release: str) -> None:
    for manifest in render(release=release):
        assert kube_schemas.faults(manifest, "1.34") == [], name_of(manifest)


def test_services_listen_in_a_cluster_with_ipv6_only() -> None:
    rendered = render(values={"listen": "::"})
    for name in ("router", "verifier", "draft"):
        pod = rendered.pod_with("router" if name == "router" else "verifier")
        assert settings_of(pod, pod.container(name)).host == "::"


def test_two_releases_share_no_name_and_no_pod() -> None:
    one, other = render(release="one"), render(release="other")
    assert not {(m["kind"], m["metadata"]["name"]) for m in one} & {(m["kind"], m["metadata"]["name"]) for m in other}
    for selector in (selector for manifest in one for selector in selectors(manifest)):
        assert not any(selects(selector, pod.labels) for pod in other.pods()), selector


# ---- values


def test_a_value_that_the_chart_has_not_is_refused_by_name() -> None:
    """In every section at once, since the schema's message lists all faults."""
    places = [path for path, value in walk(VALUES) if is_section(path, value)]
    assert len(places) > 20
    values = nested({f"{path}.noSuchValue": 1 for path in places})
    said = refusal(values=values)
    for path in places:
        assert re.search(rf"{pointer(path)}'?:? .{{0,40}}noSuchValue", said), f"{path}: {said}"


def test_a_value_of_another_type_is_refused_by_name() -> None:
    leaves = {path: value for path, value in walk(VALUES) if is_leaf(path, value)}
    assert len(leaves) > 60
    said = refusal(values=nested({path: {"a": 1} if isinstance(value, list) else [] for path, value in leaves.items()}))
    for path in leaves:
        assert f"at '{pointer(path)}'" in said, f"{path}: {said}"


def test_a_negative_number_is_refused_by_name() -> None:
    numbers = [path for path, value in walk(VALUES) if is_leaf(path, value) and type(value) in (int, float)]
    assert len(numbers) > 15
    said = refusal(values=nested(dict.fromkeys(numbers, -1)))
    for path in numbers:
        assert f"at '{pointer(path)}'" in said, f"{path}: {said}"


# ---- what cannot work


REFUSED: dict[str, tuple[Json, list[str]]] = {
    "more GPUs than the node has": (
        {"placement": "dedicated"},
        ["model.tensorParallel 8", "9 GPUs", "gpu.perNode 8", "set placement to shared"],
    ),
    "a draft's GPU where there are none": (
        {"gpu": {"mode": "cpu"}, "model": {"tensorParallel": 1}, "placement": "dedicated"},
        ["placement", "gpu.mode cpu"],
    ),
    "a draft's GPU for a draft that computes on none": (
        {"gpu": {"perNode": 9}, "placement": "dedicated", "draft": {"drafter": "ngram", "model": ""}},
        ["ngram computes on none", "set placement to shared"],
    ),
    "a target over several CPUs": ({"gpu": {"mode": "cpu"}}, ["model.tensorParallel is 8", "set it to 1"]),
    "the CPU image's model on GPUs": ({"model": {"name": "specdec:demo"}}, ["specdec:demo", "set gpu.mode to cpu"]),
    "a draft without weights": ({"draft": {"model": ""}}, ["causal needs draft.model"]),
    "a head without weights": ({"draft": {"drafter": "eagle3", "model": ""}}, ["eagle3 needs draft.model"]),
    "weights that are not used": (
        {"draft": {"drafter": "ngram"}},
        ["Qwen/Qwen3-0.6B", "ngram", 'set draft.model to ""'],
    ),
    "a draft on a GPU that the target has not": ({"shared": {"gpu": 8}}, ["shared.gpu is 8", "GPUs 0 to 7"]),
    "one node's volume for two pairs": (
        {"engine": {"replicas": 2}},
        ["engine.replicas is 2", "ReadWriteOnce", "set weights.accessMode to ReadWriteMany"],
    ),
    "one pod's volume for two pairs": (
        {"engine": {"replicas": 2}, "weights": {"accessMode": "ReadWriteOncePod"}},
        ["engine.replicas is 2", "ReadWriteMany"],
    ),
    "a new volume that is read-only": (
        {"weights": {"readOnly": True}},
        ["weights.readOnly needs weights.existingClaim"],
    ),
    "a range upside down": (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
        ["minReplicas 9", "maxReplicas 8"],
    ),
    "a share of nothing": (
        {"router": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}},
        ["router.resources.requests.cpu", "targetCPU"],
    ),
    "an end before a warning": ({"engine": {"stallSeconds": 900}}, ["engine.stallSeconds", "engine.deadSeconds"]),
    "memory in a unit of its own": ({"engine": {"shmSize": "1.5Gi"}}, ["1.5Gi"]),
}


@pytest.mark.parametrize(("values", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_what_to_set(values: Json, words: list[str]) -> None:
    said = refusal(values=values)
    assert all(word in said for word in words), said


def test_each_refusal_has_a_test() -> None:
    sentences = re.findall(r"\bfail \(?(?:printf )?\"((?:[^\"\\]|\\.)*)\"", templates())
    tested = [refusal(values=values) for values, _ in REFUSED.values()] + [refusal(values=DRA, kubernetes="1.33")]
    tested += [refusal(values={"engine": {"shmSize": "1.5Gi"}}, flags=("--skip-schema-validation",))]
    assert len(sentences) > 5
    for sentence in sentences:
        pattern = ".*".join(re.escape(part) for part in re.split(r"%[a-z]", sentence.replace('\\"', '"')))
        assert any(re.search(pattern, said) for said in tested), sentence


DRA = {"gpu": {"mode": "dra"}}


def test_claims_are_refused_where_kubernetes_has_none() -> None:
    said = refusal(values=DRA, kubernetes="1.33")
    assert "needs Kubernetes 1.34" in said
    assert "set gpu.mode to wholeNode" in said
    assert uses_dra(render(values=DRA, kubernetes="1.34"))


@pytest.mark.parametrize("weights", [{"accessMode": "ReadWriteMany"}, {"existingClaim": "nfs"}, {"size": ""}])
def test_two_pairs_may_share_what_several_nodes_may_mount(weights: Json) -> None:
    assert render(values={"engine": {"replicas": 2}, "weights": weights}).pod_with("verifier")


# ---- what points at what


@each_case
def test_services_lead_to_ports_of_pods(case: str) -> None:
    rendered = render(case)
    assert len(rendered.of("Service")) >= 2
    for service in rendered.of("Service"):
        pods = [pod for pod in rendered.pods() if selects(service["spec"]["selector"], pod.labels)]
        assert len(pods) == 1, name_of(service)
        for port in service["spec"]["ports"]:
            assert port.get("targetPort", port["port"]) in port_words(pods[0]), f"{name_of(service)} {port}"


@each_case
def test_workloads_select_their_own_pods_only(case: str) -> None:
    rendered = render(case)
    for manifest in (*rendered.of("Deployment"), *rendered.of("StatefulSet")):
        selector = manifest["spec"]["selector"]["matchLabels"]
        owners = [pod.name for pod in rendered.pods() if selects(selector, pod.labels)]
        assert owners == [name_of(manifest)]
        assert not any("version" in label or "chart" in label for label in selector), "would change with an upgrade"
        pod = next(pod for pod in rendered.pods() if pod.name == owners[0])
        assert "helm.sh/chart" not in pod.labels, "each version of the chart would load the models anew"


@each_case
def test_disruption_budgets_and_policies_are_about_one_workload_each(case: str) -> None:
    rendered = render(case)
    assert rendered.of("PodDisruptionBudget")
    assert rendered.of("NetworkPolicy")
    for budget in rendered.of("PodDisruptionBudget"):
        pods = [pod for pod in rendered.pods() if selects(budget["spec"]["selector"]["matchLabels"], pod.labels)]
        assert len(pods) == 1, name_of(budget)
        assert budget["spec"].get("maxUnavailable") != 0, "no node could be drained"
    for policy in rendered.of("NetworkPolicy"):
        pods = [
            pod for pod in rendered.pods() if selects(policy["spec"]["podSelector"].get("matchLabels", {}), pod.labels)
        ]
        assert len(pods) == 1, name_of(policy)
        for rule in policy["spec"].get("ingress", ()):
            for port in rule.get("ports", ()):
                assert port["port"] in port_words(pods[0]), f"{name_of(policy)} {port}"


@each_case
def test_what_pods_refer_to_is_there(case: str) -> None:
    """Or is the user's own, named in the values."""
    rendered = render(case)
    own = {(m["kind"], m["metadata"]["name"]) for m in rendered}
    users = set(strings(json.loads(json.dumps(values_of(case)))))
    for pod in rendered.pods():
        for kind, name, optional in references(pod):
            assert (kind, name) in own or name in users or optional, f"{pod.name}: {kind} {name}"
        volumes = {volume["name"] for volume in pod.spec.get("volumes", ())}
        mounts = {mount["name"] for c in pod.containers for mount in c.get("volumeMounts", ())}
        claims = {claim["metadata"]["name"] for claim in pod.owner["spec"].get("volumeClaimTemplates", ())}
        assert mounts <= volumes | claims, pod.name
        assert volumes <= mounts, f"{pod.name}: mounted nowhere"
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            assert len(paths) == len(set(paths)), f"{pod.name} {container['name']}"


@each_case
def test_secrets_hold_the_keys_that_are_asked_for(case: str) -> None:
    rendered = render(case)
    secrets = {m["metadata"]["name"]: {**m.get("data", {}), **m.get("stringData", {})} for m in rendered.of("Secret")}
    for pod in rendered.pods():
        for path, node in walk(pod.spec):
            if path.endswith(".secretKeyRef") and node["name"] in secrets:
                assert node["key"] in secrets[node["name"]]
            if path.endswith(".secret") and node["secretName"] in secrets:
                for item in node.get("items", ()):
                    assert item["key"] in secrets[node["secretName"]]


def test_the_autoscaler_scales_the_router_and_is_alone_in_it() -> None:
    rendered = render(values={"router": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 5}}})
    scaler = rendered.one("HorizontalPodAutoscaler")["spec"]
    router = rendered.pod_with("router").owner
    assert scaler["scaleTargetRef"] == {
        "apiVersion": router["apiVersion"],
        "kind": "Deployment",
        "name": router["metadata"]["name"],
    }
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 5)
    assert "replicas" not in router["spec"], "each upgrade would undo what the autoscaler did"
    assert "cpu" in rendered.pod_with("router").container("router")["resources"]["requests"], "percent of what?"
    assert render().pod_with("router").owner["spec"]["replicas"] == VALUES["router"]["replicas"]
    assert not render().of("HorizontalPodAutoscaler")


@each_case
def test_the_set_s_service_is_headless_and_leads_routers_to_each_pair(case: str) -> None:
    rendered = render(case)
    engine = rendered.pod_with("verifier")
    assert engine.owner["kind"] == "StatefulSet"
    service = next(s for s in rendered.of("Service") if s["metadata"]["name"] == engine.owner["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    assert selects(service["spec"]["selector"], engine.labels)
    verifier = verifier_settings(engine)
    router = router_settings(rendered.pod_with("router"))
    name, _, port = router.pairs[0].removeprefix("dns://").rpartition(":")
    assert len(router.pairs) == 1
    assert router.pairs[0].startswith("dns://"), "pairs that come later would be left out"
    assert name.split(".")[0] == service["metadata"]["name"]
    assert int(port) == verifier.control_port
    assert verifier.advertise == POD_IP, "the address of this pod alone"


# ---- memory, devices, processes


@each_case
def test_both_engine_containers_share_one_dev_shm_that_the_limit_counts(case: str) -> None:
    rendered, values = render(case), values_of(case)
    engine = rendered.pod_with("verifier")
    mounted = [
        mount["name"]
        for c in engine.spec["containers"]
        for mount in c["volumeMounts"]
        if mount["mountPath"] == "/dev/shm"
    ]
    assert len(mounted) == len(engine.spec["containers"])
    assert len(set(mounted)) == 1
    volume = next(volume for volume in engine.spec["volumes"] if volume["name"] == mounted[0])["emptyDir"]
    assert volume["medium"] == "Memory"
    assert volume["sizeLimit"] == values["engine"]["shmSize"]
    asked = values["verifier"]["resources"]
    got = engine.container("verifier")["resources"]
    for half in ("requests", "limits"):
        expected = quantity(asked[half]["memory"]) + quantity(volume["sizeLimit"])
        assert quantity(got[half]["memory"]) == pytest.approx(expected, rel=0.001), half
    in_memory = [v for v in engine.spec["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert all("sizeLimit" in volume["emptyDir"] for volume in in_memory)


@each_case
def test_pods_share_only_their_own_processes(case: str) -> None:
    rendered = render(case)
    for pod in rendered.pods():
        for name in ("hostIPC", "hostPID", "hostNetwork"):
            assert not pod.spec.get(name), f"{pod.name} {name}"
        assert not any("hostPath" in volume for volume in pod.spec.get("volumes", ()))
        assert bool(pod.spec.get("shareProcessNamespace")) == (len(pod.spec["containers"]) > 1), pod.name
        assert pod.spec["enableServiceLinks"] is False, pod.name


@each_case
def test_a_pod_asks_for_its_devices_once(case: str) -> None:
    """Two containers that ask separately get different GPUs, and cannot open each other's memory."""
    rendered, values = render(case), values_of(case)
    engine = rendered.pod_with("verifier")
    asking = {
        c["name"]: limits
        for c in engine.containers
        if (limits := {k: v for k, v in c["resources"].get("limits", {}).items() if "/" in k})
    }
    claims = {c["name"]: [claim["name"] for claim in c["resources"].get("claims", ())] for c in engine.containers}
    gpu = values["gpu"]
    if gpu["mode"] == "wholeNode":
        assert asking == {"verifier": {gpu["resource"]: gpu["perNode"]}}
        assert "resourceClaims" not in engine.spec
    elif gpu["mode"] == "dra":
        assert asking == {}
        assert len(engine.spec["resourceClaims"]) == 1
        claim = engine.spec["resourceClaims"][0]
        assert all(claims[c["name"]] == [claim["name"]] for c in engine.spec["containers"])
        template = next(
            t
            for t in rendered.of("ResourceClaimTemplate")
            if t["metadata"]["name"] == claim["resourceClaimTemplateName"]
        )
        request = template["spec"]["spec"]["devices"]["requests"]
        wanted = values["model"]["tensorParallel"] + (values["placement"] == "dedicated")
        assert [one["exactly"]["count"] for one in request] == [wanted]
        assert request[0]["exactly"]["deviceClassName"] == gpu["deviceClass"]
    else:
        assert asking == {}
        assert "resourceClaims" not in engine.spec
        assert not any(claims.values())
    assert not rendered.of("ResourceClaimTemplate") or gpu["mode"] == "dra"


# ---- probes, updates, ends


@each_case
def test_probes_ask_what_they_mean_and_wait_long_enough(case: str) -> None:
    rendered, values = render(case), values_of(case)
    engine, router = rendered.pod_with("verifier"), rendered.pod_with("router")
    settings = verifier_settings(engine)
    probes = {
        (c["name"], kind): c[kind]
        for pod in (engine, router)
        for c in pod.spec["containers"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        if kind in c
    }
    paths = {"startupProbe": {"/livez", "/readyz"}, "readinessProbe": {"/readyz"}, "livenessProbe": {"/livez"}}
    for (name, kind), probe in probes.items():
        assert probe["httpGet"]["path"] in paths[kind], f"{name} {kind}"
        pod = router if name == "router" else engine
        port = probe["httpGet"]["port"]
        number = pod.ports().get(port, port)
        loaded = settings_of(pod, pod.container(name))
        assert number == (loaded.admin_port if isinstance(loaded, RouterSettings) else loaded.health_port), (name, kind)
        assert probe["timeoutSeconds"] >= 5, f"{name} {kind}"
        if kind == "livenessProbe":
            assert probe["failureThreshold"] * probe.get("periodSeconds", 10) >= 60, f"{name}: load alone would kill it"
    assert {("verifier", "startupProbe"), ("verifier", "readinessProbe"), ("verifier", "livenessProbe")} <= set(probes)
    assert {("router", "readinessProbe"), ("router", "livenessProbe")} <= set(probes)
    start = probes["verifier", "startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] >= 60 * values["engine"]["startMinutes"]
    assert settings.start_timeout_s < start["failureThreshold"] * start["periodSeconds"], (
        "ends with its own word on why"
    )
    assert settings.start_timeout_s >= 0.9 * 60 * values["engine"]["startMinutes"]
    assert settings.stall_s == values["engine"]["stallSeconds"]
    assert settings.dead_s == values["engine"]["deadSeconds"]
    if case == DEFAULTS:
        assert settings.start_timeout_s >= 0.9 * 3600


@each_case
def test_a_draft_that_is_away_takes_no_pair_out(case: str) -> None:
    """A pod is ready when all its containers are, and the pair answers without its draft."""
    for container in render(case).pod_with("verifier").spec["containers"]:
        if container["name"] == "draft":
            assert "readinessProbe" not in container


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_update_needs_no_spare_gpu(replicas: int) -> None:
    values = {"engine": {"replicas": replicas}, "weights": {"accessMode": "ReadWriteMany"}}
    rendered = render(values=values)
    engine = rendered.pod_with("verifier").owner
    assert engine["kind"] == "StatefulSet", "which never has more pods than replicas"
    assert engine["spec"]["replicas"] == replicas
    assert engine["spec"]["updateStrategy"]["type"] == "RollingUpdate"
    assert engine["spec"]["podManagementPolicy"] == "Parallel" or replicas == 1, "one start waits for the other's"
    deleted = render(values=values | {"engine": {"replicas": replicas, "updateStrategy": "OnDelete"}})
    assert deleted.pod_with("verifier").owner["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_routers_roll_without_one_less() -> None:
    deployment = render().pod_with("router").owner["spec"]
    assert deployment["progressDeadlineSeconds"] > 60 * VALUES["engine"]["startMinutes"], (
        "none is ready before a pair is"
    )
    rolling = deployment["strategy"]
    assert rolling["type"] == "RollingUpdate"
    assert rolling["rollingUpdate"]["maxUnavailable"] == 0
    assert quantity(str(rolling["rollingUpdate"]["maxSurge"]).rstrip("%")) > 0


@each_case
def test_the_grace_is_longer_than_what_answers_may_take(case: str) -> None:
    rendered, values = render(case), values_of(case)
    router, engine = rendered.pod_with("router"), rendered.pod_with("verifier")
    pause = pre_stop_s(router.container("router"))
    assert pause >= 5, "new requests come until everybody knows that it goes"
    assert router_settings(router).drain_s == values["router"]["drainSeconds"]
    assert router.spec["terminationGracePeriodSeconds"] >= pause + values["router"]["drainSeconds"] + 5
    assert verifier_settings(engine).stop_grace_s == values["engine"]["drainSeconds"]
    assert engine.spec["terminationGracePeriodSeconds"] >= values["engine"]["drainSeconds"] + 30


# ---- who may do what


@each_case
def test_containers_have_no_rights(case: str) -> None:
    for pod in render(case).pods():
        assert pod.spec["automountServiceAccountToken"] is False, pod.name
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True, pod.name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own["readOnlyRootFilesystem"] is True
            assert not own.get("privileged")
            assert own.get("runAsUser") != 0


def test_the_cluster_may_choose_the_user() -> None:
    """OpenShift gives each namespace its own range, and refuses what names another."""
    values = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}
    for pod in render(values=values).pods():
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        for holder in (pod.spec, *pod.containers):
            assert not {"runAsUser", "runAsGroup", "fsGroup"} & holder["securityContext"].keys()


@each_case
def test_what_is_written_has_a_place_under_a_read_only_root(case: str) -> None:
    for pod in render(case).pods():
        if pod.is_hook:
            continue
        for container in pod.containers:
            writable = [
                mount["mountPath"]
                for mount in container.get("volumeMounts", ())
                if not mount.get("readOnly") and "emptyDir" in volume_of(pod, mount)
            ]
            assert "/tmp" in writable, f"{pod.name} {container['name']}"
            for name, place in {**image_variables(container), **environment(pod, container)}.items():
                if re.search("(^HOME|_HOME|_CACHE|_DIR|_ROOT)$", name) and name != "HF_HOME":
                    assert any(Path(place).is_relative_to(path) for path in writable), (
                        f"{container['name']} {name}={place}"
                    )


@each_case
def test_no_secret_stands_where_it_can_be_read(case: str) -> None:
    """The chart's own secrets are in Secrets only, and a user's are only ever referred to."""
    rendered = render(case)
    content = [
        value if key == "stringData" else base64.b64decode(value).decode()
        for secret in rendered.of("Secret")
        for key in ("data", "stringData")
        for value in secret.get(key, {}).values()
    ]
    lines = [line for text in content for line in text.split() if len(line) >= 16]
    rest = json.dumps([manifest for manifest in rendered if manifest["kind"] != "Secret"])
    assert not [line for line in lines if line in rest]
    for pod in rendered.pods():
        for container in pod.containers:
            for entry in container.get("env", ()):
                if re.search(r"TOKEN$|SECRET$|_KEYS?$|PASSWORD", entry["name"]):
                    assert "valueFrom" in entry, entry["name"]
            given = [
                word
                for word in arguments(pod, container)
                if re.match("--.*(token|secret|password|key|-file)(=|$)", word)
            ]
            assert all(re.fullmatch("[^=]+=/.*", word) for word in given), f"{given} are no files"


def test_a_token_of_the_user_is_referred_to_and_nothing_else() -> None:
    rendered = render(values={"huggingface": {"existingSecret": "my-hub", "secretKey": "hub"}})
    engine = rendered.pod_with("verifier")
    holders = [entry for c in engine.containers for entry in c.get("env", ()) if entry["name"] == "HF_TOKEN"]
    assert holders
    assert all(entry["valueFrom"]["secretKeyRef"] == {"name": "my-hub", "key": "hub"} for entry in holders)
    assert "HF_TOKEN" not in json.dumps(render().pod_with("verifier").spec)


# ---- what the services are started with


@each_case
def test_the_services_take_what_they_are_started_with(case: str) -> None:
    rendered = render(case)
    started = {}
    for pod in rendered.pods():
        for container in pod.containers:
            words = arguments(pod, container)
            assert not [word for word in words if "$(" in word], words
            started[words[0]] = settings_of(pod, container)
            for name in environment(pod, container):
                known_variable(name)
    assert set(started) == set(COMMANDS)


@each_case
def test_vllm_takes_what_it_is_started_with(case: str) -> None:
    engine = render(case).pod_with("verifier")
    _, extra = split_extra(arguments(engine, engine.container("verifier")))
    settings = verifier_settings(engine).model_copy(update={"model": "any"})
    assert engine_command(settings, extra)[-len(extra) :] == extra, "nothing that the plug-ins set themselves"
    flags = [word.partition("=")[0] for word in extra if word.startswith("--")]
    assert set(flags) <= vllm_flags()


def test_settings_are_all_that_the_chart_does_not_set_itself() -> None:
    """By the schema: else a flag would stand twice, or could not be set at all."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    for name, kind in (("router", RouterSettings), ("verifier", VerifierSettings), ("draft", DraftSettings)):
        own: set[str] = set()
        for case in CASES:
            rendered = render(case, {"control": {"tls": {"existingSecret": "t"}}})
            pod = rendered.pod_with("router" if name == "router" else "verifier")
            words = split_extra(arguments(pod, pod.container(name)))[0]
            own |= (
                {word.partition("=")[0][2:] for word in words[1:]} - {"no-auth"} - {*values_of(case)[name]["settings"]}
            )
        fixed = {"port", "admin-port", "control-port", "health-port", "auth"}  # which the manifests name
        free = set(schema[name]["properties"]["settings"]["properties"])
        assert free | own | fixed >= {field.replace("_", "-") for field in kind.model_fields}, name
        assert not free & (own | fixed) - {"run-ahead"}, name


@each_case
def test_services_listen_where_others_reach_them(case: str) -> None:
    rendered = render(case)
    for name in ("router", "verifier", "draft"):
        pod = rendered.pod_with("router" if name == "router" else "verifier")
        if name not in [c["name"] for c in pod.containers]:
            continue
        container = pod.container(name)
        settings = settings_of(pod, container)
        assert settings.host in ("0.0.0.0", "::")
        ports = {port["containerPort"] for port in container["ports"]}
        if isinstance(settings, RouterSettings):
            assert settings.admin_host == settings.host
            assert ports == {settings.port, settings.admin_port}
            assert settings.api_keys_file or not settings.auth
        elif isinstance(settings, VerifierSettings):
            assert ports == {settings.port, settings.control_port, settings.health_port}
            assert settings.advertise, "a verifier that listens everywhere must be told its address"
        else:
            assert ports == {settings.health_port}
    numbers = list(rendered.pod_with("verifier").ports().values())
    assert len(numbers) == len(set(numbers)), "containers of a pod share its ports"


@each_case
def test_the_pair_is_one_pair(case: str) -> None:
    engine = render(case).pod_with("verifier")
    verifier = verifier_settings(engine)
    names = [c["name"] for c in engine.containers]
    if "draft" in names:
        draft = settings_of(engine, engine.container("draft"))
        assert draft.pair == verifier.pair
        assert (draft.drafter == "eagle3") == (verifier.head is not None)
        if draft.drafter == "eagle3":
            assert draft.model == verifier.head
        assert (draft.model is not None) == (draft.drafter in ("causal", "eagle3"))
    router = router_settings(render(case).pod_with("router"))
    assert (router.control_secret_file is None) == (verifier.control_secret_file is None)
    assert (router.control_tls_cert is None) == (verifier.control_tls_cert is None)
    assert router.control_secret_file or router.control_tls_cert, "whoever reaches the control port could order"


# ---- the way in


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


# ---- watching it


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


# ---- what the user adds


def test_what_the_user_adds_arrives() -> None:
    variable, volume = (
        {"name": "NCCL_P2P_LEVEL", "value": "SYS"},
        {"name": "certs", "secret": {"secretName": "my-certs"}},
    )
    mount = {"name": "certs", "mountPath": "/certs", "readOnly": True}
    common = {
        **{"podAnnotations": {"a": "b"}, "podLabels": {"team": "x"}, "nodeSelector": {"pool": "p"}},
        **{"tolerations": [{"key": "k", "operator": "Exists"}], "priorityClassName": "high", "extraVolumes": [volume]},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
                }
            }
        },
        "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    }
    per_container = {"extraEnv": [variable], "extraVolumeMounts": [mount]}
    values = {
        "engine": {**common, "initContainers": [{"name": "fetch", "image": "fetch:1"}]},
        "router": {**common, **per_container, "settings": {"max-waiting": 7, "window": 2}},
        "verifier": {**per_container, "extraArgs": ["--quantization", "fp8"], "settings": {"draft-deadline-ms": 7.5}},
        "draft": {
            **per_container,
            "settings": {"dtype": "fp8", "trust-vocabulary": True, "spin-ms": 0, "run-ahead": "on"},
        },
        "gpu": {"runtimeClass": "nvidia"},
        "images": {"registry": "registry.example.org/team/", "pullSecrets": ["pull"], "pullPolicy": "Always"},
        "serviceAccount": {"annotations": {"role": "r"}},
    }
    rendered = render(values=values)
    engine, router = rendered.pod_with("verifier"), rendered.pod_with("router")
    for pod in (engine, router):
        assert kube_schemas.faults(pod.owner, "1.34") == []
        assert pod.template["metadata"]["annotations"]["a"] == "b"
        assert pod.labels["team"] == "x"
        for name in ("nodeSelector", "tolerations", "priorityClassName", "affinity", "topologySpreadConstraints"):
            assert pod.spec[name] == common[name], name
        assert volume in pod.spec["volumes"]
        assert pod.spec["imagePullSecrets"] == [{"name": "pull"}]
        for container in pod.spec["containers"]:
            assert container["image"].startswith("registry.example.org/team/specdec-")
            assert container["imagePullPolicy"] == "Always"
            assert container["env"][-1] == variable, "after the chart's own, so that it stands"
            assert mount in container["volumeMounts"]
    assert engine.spec["initContainers"][0]["name"] == "fetch"
    assert engine.spec["runtimeClassName"] == "nvidia"
    settings = router_settings(router)
    assert (settings.max_waiting, settings.window) == (7, 2)
    assert verifier_settings(engine).draft_deadline_ms == 7.5
    draft = settings_of(engine, engine.container("draft"))
    assert (draft.dtype, draft.trust_vocabulary, draft.spin_ms, draft.run_ahead) == ("fp8", True, 0, "on")
    words = arguments(engine, engine.container("verifier"))
    assert words[-2:] == ["--quantization", "fp8"]
    assert rendered.one("ServiceAccount")["metadata"]["annotations"] == {"role": "r"}


def test_images_are_named_by_tag_or_digest() -> None:
    digest = "sha256:" + "0" * 64
    rendered = render(values={"images": {"engine": {"tag": "t1"}, "router": {"digest": digest}}})
    assert {c["image"] for c in rendered.pod_with("verifier").containers} == {"specdec-engine:t1"}
    assert rendered.pod_with("router").container("router")["image"] == f"specdec-router@{digest}"
    assert render().pod_with("router").container("router")["image"] == f"specdec-router:{META['appVersion']}"


def test_a_user_s_own_secrets_claim_and_account_are_taken() -> None:
    values = {
        "auth": {"existingSecret": "my-keys", "secretKey": "file"},
        "control": {"existingSecret": "my-control", "tls": {"existingSecret": "my-tls"}},
        "weights": {"existingClaim": "my-claim", "readOnly": True},
        "serviceAccount": {"create": False, "name": "my-account"},
    }
    rendered = render(values=values)
    for kind in ("Secret", "PersistentVolumeClaim", "ServiceAccount"):
        assert not rendered.of(kind), kind
    used = {(kind, name) for pod in rendered.pods() for kind, name, _ in references(pod)}
    assert used == {
        *(("Secret", name) for name in ("my-keys", "my-control", "my-tls")),
        ("PersistentVolumeClaim", "my-claim"),
        ("ServiceAccount", "my-account"),
    }
    engine, router = rendered.pod_with("verifier"), rendered.pod_with("router")
    assert router_settings(router).api_keys_file == Path("/etc/specdec/keys/file")
    assert environment(engine, engine.container("verifier"))["HF_HUB_OFFLINE"] == "1"
    for name in ("verifier", "draft"):
        mount = next(m for m in engine.container(name)["volumeMounts"] if m["name"] == "weights")
        assert mount["readOnly"] is True


def test_files_that_services_read_are_mounted() -> None:
    """Secrets' keys are files below the mount; TLS has the three that Kubernetes' own type has, and the authority."""
    rendered = render(values={"control": {"tls": {"existingSecret": "my-tls"}}})
    for pod, name in ((rendered.pod_with("router"), "router"), (rendered.pod_with("verifier"), "verifier")):
        container, settings = pod.container(name), settings_of(pod, pod.container(name))
        mounts = {
            Path(m["mountPath"]): volume_of(pod, m)["secret"]
            for m in container["volumeMounts"]
            if "secret" in volume_of(pod, m)
        }
        secrets = {m["metadata"]["name"]: set(m["data"]) for m in rendered.of("Secret")}
        secrets["my-tls"] = {"tls.crt", "tls.key", "ca.crt"}
        for field in ("control_secret_file", "control_tls_cert", "control_tls_key", "control_tls_ca", "api_keys_file"):
            if path := getattr(settings, field, None):
                assert path.name in secrets[mounts[path.parent]["secretName"]], field


# ---- what the tests above look things up with


def templates() -> str:
    return "\n".join(path.read_text() for path in sorted((CHART / "templates").rglob("*")) if path.is_file())


def name_of(manifest: Json) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def uses_dra(rendered: Rendered) -> bool:
    return any(manifest["apiVersion"].startswith("resource.k8s.io/") for manifest in rendered)


def settled(rendered: Rendered) -> list[Json]:
    """Without what each rendering makes anew."""
    return [
        manifest if manifest["kind"] != "Secret" else {**manifest, "data": sorted(manifest["data"])}
        for manifest in rendered
    ]


def values_of(case: str) -> Json:
    """The values a case is rendered with."""
    if case == DEFAULTS:
        return VALUES
    return merged(VALUES, yaml.safe_load((CHART / "examples" / f"{case}.yaml").read_text()))


def merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}


def nested(flat: dict[str, Any]) -> Json:
    """{".a.b": 1} as {"a": {"b": 1}}."""
    root: Json = {}
    for path, value in flat.items():
        *folders, last = path.lstrip(".").split(".")
        node = root
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = value
    return root


def find(node: Any, path: str) -> Any:
    for key in path.split(".")[1:]:
        node = node.get(key) if isinstance(node, dict) else None
    return node


# Mappings whose keys are the user's, or Kubernetes'.
FREE = re.compile(
    r"\.(settings|podAnnotations|podLabels|annotations|labels|nodeSelector|affinity|resources|podSecurityContext)(\.|$)"
)


IN_LIST = re.compile(r"\.\d+(\.|$)")


def is_section(path: str, value: Any) -> bool:
    return isinstance(value, dict) and not FREE.search(path) and not IN_LIST.search(path)


def is_leaf(path: str, value: Any) -> bool:
    return path != "" and not isinstance(value, dict) and not FREE.search(path) and not IN_LIST.search(path)


def pointer(path: str) -> str:
    return path.replace(".", "/")


def strings(node: Any) -> list[str]:
    return [value for _, value in walk(node) if isinstance(value, str)]


def selectors(manifest: Json) -> list[dict[str, str]]:
    """Every selector of pods in a manifest."""
    spec = manifest.get("spec", {})
    found = [spec["selector"]] if manifest["kind"] == "Service" else []
    found += [
        node for path, node in walk(spec) if path.endswith(".matchLabels") and manifest["kind"] != "ServiceMonitor"
    ]
    return found


def port_words(pod: Pod) -> set[str | int]:
    """A pod's ports by name and number."""
    return {*pod.ports().keys(), *pod.ports().values()}


def references(pod: Pod) -> list[tuple[str, str, bool]]:
    """(kind, name, whether the pod starts without it) of all that a pod needs by name."""
    found: list[tuple[str, str, bool]] = []
    for path, node in walk(pod.spec):
        last = path.rpartition(".")[2]
        if last in ("secretKeyRef", "secretRef"):
            found.append(("Secret", node["name"], node.get("optional", False)))
        elif last in ("configMapKeyRef", "configMapRef", "configMap"):
            found.append(("ConfigMap", node["name"], node.get("optional", False)))
        elif last == "secret":
            name = node.get("secretName") or node["name"]  # of a volume, or of a projected one
            found.append(("Secret", name, node.get("optional", False)))
        elif last == "persistentVolumeClaim":
            found.append(("PersistentVolumeClaim", node["claimName"], False))
        elif last == "resourceClaimTemplateName":
            found.append(("ResourceClaimTemplate", node, False))
        elif last == "serviceAccountName" and node != "default":
            found.append(("ServiceAccount", node, False))
    return found


def image_variables(container: Json) -> dict[str, str]:
    """What the Dockerfile sets, PATH aside; of the router's image all that matters is where its home is."""
    if container["name"] == "router":
        return {"HOME": "/tmp"}
    blocks = re.findall(r"^ENV ((?:.*\\\n)*.*)$", (CHART.parent / "Dockerfile").read_text(), re.MULTILINE)
    pairs = [word.partition("=") for block in blocks for word in block.replace("\\\n", " ").split()]
    return {name: value for name, _, value in pairs if name != "PATH"}


def vllm_flags() -> set[str]:
    """The flags of vLLM's server, read off its source: its parser takes seconds to make."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    flags = {"--trust-remote-code"}
    for file in (folder / "engine" / "arg_utils.py", *(folder / "entrypoints").rglob("cli_args.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                fields = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
                flags |= {"--" + field.replace("_", "-") for field in fields}
    return flags


def volume_of(pod: Pod, mount: Json) -> Json:
    return next((volume for volume in pod.spec.get("volumes", ()) if volume["name"] == mount["name"]), {})


def pre_stop_s(container: Json) -> float:
    """Seconds that a container's end waits before SIGTERM."""
    hook = container["lifecycle"]["preStop"]
    if "sleep" in hook:
        return float(hook["sleep"]["seconds"])
    found = re.search(r"sleep\D+(\d+)", " ".join(hook["exec"]["command"]))
    assert found, hook
    return float(found[1])


def settings_of(pod: Pod, container: Json) -> Any:
    """What a service makes of a container's arguments and variables. Fails where it would refuse to start."""
    command, *rest = arguments(pod, container)
    variables = {k: v for k, v in environment(pod, container).items() if k.startswith("SPECDEC_")}
    ours, _ = split_extra(rest)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            return COMMANDS[command].load(ours)
        except (SpecdecError, SystemExit) as error:
            pytest.fail(f"{pod.name} {container['name']}: {error} {ours}")


def verifier_settings(pod: Pod) -> VerifierSettings:
    settings: VerifierSettings = settings_of(pod, pod.container("verifier"))
    return settings


def router_settings(pod: Pod) -> RouterSettings:
    settings: RouterSettings = settings_of(pod, pod.container("router"))
    return settings


OTHER_VARIABLES = {"SPECDEC_CACHE", "SPECDEC_CONFIG", "SPECDEC_LOG_FORMAT", "SPECDEC_LOG_LEVEL"}


def known_variable(name: str) -> None:
    """Fails for a variable with the program's prefix that it does not read: nobody else would say so."""
    if not name.startswith("SPECDEC_") or name in OTHER_VARIABLES:
        return
    fields = {
        kind.model_config["env_prefix"] + field.upper() for kind in COMMANDS.values() for field in kind.model_fields
    }
    assert name in fields, f"there is no setting {name}"
