"""The chart's values: what is refused with which words, and what a user adds arrives."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube_schemas
from chart_kit import (
    CHART,
    VALUES,
    Json,
    chart_tools,
    references,
    refusal,
    render,
    uses_dra,
    volume_of,
    walk,
)
from chart_services import (
    arguments,
    environment,
    router_settings,
    settings_of,
    verifier_settings,
)
from specdec.verifier.supervisor import OURS
from specdec.verifier.supervisor import REFUSED as REFUSED_FLAGS

META = yaml.safe_load((CHART / "Chart.yaml").read_text())


# ---- values


def test_a_value_that_the_chart_has_not_is_refused_by_name() -> None:
    """In every section at once, since the schema's message lists all faults."""
    places = [path for path, value in walk(VALUES) if is_section(path, value)]
    assert len(places) > 20
    values = nested({f"{path}.noSuchValue": 1 for path in places})
    said = refusal(values=values)
    for path in places:
        assert re.search(rf"{pointer(path)}'?:? .{{0,40}}noSuchValue", said), f"{path}: {said}"


def test_an_older_helm_refuses_the_same() -> None:
    said = refusal(
        values={"router": {"replicaz": 1}, "model": {"tensorParallel": "eight"}}, helm=chart_tools.OLDER_HELM
    )
    assert "replicaz" in said
    assert "tensorParallel" in said


def test_every_value_is_in_both_the_schema_and_the_documentation() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]  # a parent chart's

    def names(node: Json, path: str = "") -> set[str]:
        """Paths that the schema names, down to mappings whose keys are the user's."""
        below = node.get("properties", {}) if not FREE.search(path) else {}
        return {path} | {name for key, child in below.items() for name in names(child, f"{path}.{key}")}

    documented = {path for path, value in walk(VALUES) if is_section(path, value) or is_leaf(path, value) or path == ""}
    documented |= {f"{path}.{key}" for path, value in walk(VALUES) if is_section(path, value) for key in value}
    assert names(schema) == documented


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


OUT_OF_RANGE: dict[str, Any] = {
    ".monitoring.serviceMonitor.interval": "15",
    ".images.router.digest": "latest",
    ".images.registry": "https://registry.example.org",
    ".ingress.path": "v1",
    ".ingress.hosts": ["https://llm.example.org"],
    ".ingress.tls": [{"secret": "llm-tls"}],
    ".ingress.annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": 3600},
    ".weights.size": "200",
    ".weights.accessMode": "RWX",
    ".weights.mountPath": "/cache",
    ".engine.shmSize": "16",
    ".engine.updateStrategy": "Recreate",
    ".engine.pdb.maxUnavailable": 0,
    ".draft.drafter": "medusa",
    ".draft.extraEnv": [{"name": "OMP_NUM_THREADS", "value": 1}],
    ".gpu.mode": "mig",
    ".gpu.resource": "gpu",
    ".listen": "localhost",
    ".router.policy": "best",
    ".router.service.port": 70000,
    ".huggingface.endpoint": "mirror.example.org",
    ".fullnameOverride": "Specdec_1",
    ".shared.gpuMemoryUtilization": 1.5,
}


def test_a_value_out_of_range_is_refused_by_name() -> None:
    said = refusal(values=nested(OUT_OF_RANGE))
    for path, value in OUT_OF_RANGE.items():
        assert f"at '{pointer(path)}" in said, f"{path}: {value}: {said}"


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
    "the CPU image's head on GPUs": (
        {"draft": {"drafter": "eagle3", "model": "specdec:demo-head"}},
        ["draft.model specdec:demo-head", "set gpu.mode to cpu"],
    ),
    "a path that the routers have not": (
        {"ingress": {"enabled": True, "path": "/llm"}},
        ["ingress.path is /llm", "/v1", "rewrites paths"],
    ),
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
    "a second request of GPUs": (
        {"draft": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        ["draft.resources.limits has nvidia.com/gpu", "two sets of GPUs", "set gpu.mode"],
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
    tested += [refusal(values={"verifier": {"extraArgs": [flag]}}) for flag in ("--model", "--worker-cls")]
    tested += [refusal(values={"engine": {"shmSize": "1.5Gi"}}, flags=("--skip-schema-validation",))]
    assert len(sentences) > 5
    for sentence in sentences:
        pattern = ".*".join(re.escape(part) for part in re.split(r"%[a-z]", sentence.replace('\\"', '"')))
        assert any(re.search(pattern, said) for said in tested), sentence


def test_what_the_verifier_would_refuse_is_refused_before_a_pod_is_made() -> None:
    """It refuses the same flags itself, after a node was found and the image fetched."""
    assert set(re.findall(r'"(--?[a-z-]+)"', templates())) >= OURS | REFUSED_FLAGS
    for flag in ("--worker_cls=a.B", "-sc", "-pp"):
        assert f"verifier.extraArgs has {flag[:3]}" in refusal(values={"verifier": {"extraArgs": [flag]}})


def test_a_flag_that_has_a_value_of_its_own_is_led_there() -> None:
    for flag, value in (("--max-model-len", "model.maxLength"), ("--gpu_memory_utilization=0.5", "shared.gpuMemory")):
        assert f"set {value}" in refusal(values={"verifier": {"extraArgs": [flag]}})
    alone = {"draft": {"drafter": "ngram", "model": ""}, "verifier": {"extraArgs": ["--gpu-memory-utilization=0.5"]}}
    engine = render(values=alone).pod_with("verifier")
    assert arguments(engine, engine.container("verifier"))[-1] == "--gpu-memory-utilization=0.5"


def test_a_path_is_taken_where_it_is_served_or_rewritten() -> None:
    rewrite = {"nginx.ingress.kubernetes.io/rewrite-target": "/$2"}
    for path, annotations in (("/v1", {}), ("/llm(/|$)(.*)", rewrite)):
        values = {"ingress": {"enabled": True, "path": path, "annotations": annotations}}
        (rule,) = render(values=values).one("Ingress")["spec"]["rules"]
        assert rule["http"]["paths"][0]["path"] == path


def test_resources_may_be_taken_away() -> None:
    for part in ("verifier", "draft"):
        for kind in ("requests", "limits"):
            render(values={part: {"resources": {kind: None}}})


def test_a_variable_of_the_chart_s_gives_way_to_the_user_s() -> None:
    for part, pod in (("verifier", "verifier"), ("draft", "verifier"), ("router", "router")):
        entry = {"name": "SPECDEC_LOG_FORMAT", "value": "console"}
        container = render(values={part: {"extraEnv": [entry]}}).pod_with(pod).container(part)
        assert [one for one in container["env"] if one["name"] == entry["name"]] == [entry]


def test_routers_leave_a_pair_alone_when_it_says_so_itself() -> None:
    rendered = render(values={"engine": {"stallSeconds": 77}})
    assert router_settings(rendered.pod_with("router")).max_step_age_s == 77
    assert verifier_settings(rendered.pod_with("verifier")).stall_s == 77


def test_other_flags_are_vllm_s_own_affair() -> None:
    values = {"verifier": {"extraArgs": ["--model-impl=auto", "--port-range", 1, 0.5]}}
    words = arguments(engine := render(values=values).pod_with("verifier"), engine.container("verifier"))
    assert words[-4:] == ["--model-impl=auto", "--port-range", "1", "0.5"]


DRA = {"gpu": {"mode": "dra"}}


def test_claims_are_refused_where_kubernetes_has_none() -> None:
    said = refusal(values=DRA, kubernetes="1.33")
    assert "needs Kubernetes 1.34" in said
    assert "set gpu.mode to wholeNode" in said
    assert uses_dra(render(values=DRA, kubernetes="1.34"))


@pytest.mark.parametrize("weights", [{"accessMode": "ReadWriteMany"}, {"existingClaim": "nfs"}, {"size": ""}])
def test_two_pairs_may_share_what_several_nodes_may_mount(weights: Json) -> None:
    assert render(values={"engine": {"replicas": 2}, "weights": weights}).pod_with("verifier")


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


# ---- what these tests look things up with


def templates() -> str:
    return "\n".join(path.read_text() for path in sorted((CHART / "templates").rglob("*")) if path.is_file())


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
