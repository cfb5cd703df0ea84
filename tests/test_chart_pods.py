"""The chart's pods: what they refer to, their memory, devices, probes, updates and rights."""

import base64
import json
import re
from pathlib import Path

import pytest

from chart_kit import (
    DEFAULTS,
    NAMESPACE,
    VALUES,
    Json,
    each_case,
    name_of,
    port_words,
    quantity,
    references,
    render,
    selects,
    strings,
    values_of,
    volume_of,
    walk,
)
from chart_services import (
    POD_IP,
    arguments,
    environment,
    image_stage,
    image_variables,
    router_settings,
    settings_of,
    verifier_settings,
)
from specdec.router.settings import RouterSettings

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
            variables = [entry["name"] for entry in container.get("env", ())]
            assert len(variables) == len(set(variables)), "helm 4 applies on the server, which refuses a name twice"


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
    assert name == f"{service['metadata']['name']}.{NAMESPACE}.svc", "which values.yaml says the certificate is for"
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
        assert [(one["exactly"]["allocationMode"], one["exactly"]["count"]) for one in request] == [
            ("ExactCount", wanted)
        ]
        assert request[0]["exactly"]["deviceClassName"] == gpu["deviceClass"]
    else:
        assert asking == {}
        assert "resourceClaims" not in engine.spec
        assert not any(claims.values())
    assert not rendered.of("ResourceClaimTemplate") or gpu["mode"] == "dra"


@pytest.mark.parametrize("mode", ["wholeNode", "dra"])
@pytest.mark.parametrize("placement", ["shared", "dedicated"])
def test_the_draft_computes_on_a_gpu_that_it_has_and_the_target_on_others(mode: str, placement: str) -> None:
    values = {"gpu": {"mode": mode}, "placement": placement, "model": {"tensorParallel": 4}, "shared": {"gpu": 2}}
    engine = render(values=values).pod_with("verifier")
    draft, container = settings_of(engine, engine.container("draft")), engine.container("draft")
    words = arguments(engine, engine.container("verifier"))
    assert "--tensor-parallel-size=4" in words
    assert draft.device == ("cuda:2" if placement == "shared" else "cuda:4")
    assert draft.run_ahead == ("off" if placement == "shared" else "auto"), "the target computes there as well"
    assert any(word.startswith("--gpu-memory-utilization=") for word in words) == (placement == "shared")
    sees_all = environment(engine, container).get("NVIDIA_VISIBLE_DEVICES") == "all"
    assert sees_all == (mode == "wholeNode"), "a claim shows a container its devices, the device plugin who asked"


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
    rendered = render(case)
    engine = rendered.pod_with("verifier")
    assert "readinessProbe" not in engine.container("draft")
    service = next(s for s in rendered.of("Service") if s["metadata"]["name"] == engine.owner["spec"]["serviceName"])
    assert service["spec"]["publishNotReadyAddresses"] is True, (
        "a draft that fails over and over makes its pod not ready"
    )


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
            image = image_variables(image_stage(container["name"], values_of(case)))
            for name, place in {**image, **environment(pod, container)}.items():
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


# ---- what these tests look things up with


def pre_stop_s(container: Json) -> float:
    """Seconds that a container's end waits before SIGTERM."""
    hook = container["lifecycle"]["preStop"]
    if "sleep" in hook:
        return float(hook["sleep"]["seconds"])
    found = re.search(r"sleep\D+(\d+)", " ".join(hook["exec"]["command"]))
    assert found, hook
    return float(found[1])
