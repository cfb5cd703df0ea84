"""The real helm and kubectl with the chart against a fake Kubernetes API (fake_kube.py), which stores and checks
objects and runs nothing: what is proved is what helm sends, keeps and takes away."""

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chart_kit import CASES, CHART, DEFAULTS, NAMESPACE, RELEASE, chart_tools, render, values_of
from fake_kube import FakeKube, Json


@dataclass(frozen=True)
class Fake:
    """A fake cluster and how to talk to it."""

    kube: FakeKube
    kubeconfig: Path

    def helm(self, command: str, *arguments: str | Path, version: str = chart_tools.HELM) -> str:
        done = self.helm_unchecked(command, *arguments, version=version)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def helm_unchecked(
        self, command: str, *arguments: str | Path, version: str = chart_tools.HELM
    ) -> subprocess.CompletedProcess[str]:
        words = (command, RELEASE, *arguments, "--namespace", NAMESPACE)
        return chart_tools.helm(*words, version=version, kubeconfig=self.kubeconfig)

    def install(self, *arguments: str | Path, version: str = chart_tools.HELM) -> str:
        return self.helm("install", CHART, "--create-namespace", *arguments, version=version)

    def kubectl(self, *arguments: str) -> str:
        command = [chart_tools.kubectl_path(), "--kubeconfig", self.kubeconfig, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def stored(self) -> dict[tuple[str, str], Json]:
        """What is in the release's namespace, helm's own records aside."""
        return {
            (found["kind"], key.name): found
            for key, found in self.kube.objects.items()
            if key.namespace == NAMESPACE and not key.name.startswith("sh.helm.release.")
        }

    def secrets(self) -> dict[str, Json]:
        return {name: found["data"] for (kind, name), found in self.stored().items() if kind == "Secret"}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    kube = FakeKube()
    with kube.serving(tmp_path) as kubeconfig:
        yield Fake(kube, kubeconfig)


def test_install_upgrade_rollback_test_uninstall_on_the_fake(fake: Fake) -> None:
    fake.install()
    installed = fake.stored()
    assert set(installed) == {(m["kind"], m["metadata"]["name"]) for m in render() if not is_hook(m)}
    router = next(name for kind, name in installed if kind == "Deployment")
    secrets = fake.secrets()
    assert len({json.dumps(data) for data in secrets.values()}) == len(secrets) > 0

    fake.helm("upgrade", CHART, "--set", "router.replicas=5,monitoring.dashboards.enabled=false")
    upgraded = fake.stored()
    assert upgraded["Deployment", router]["spec"]["replicas"] == 5
    assert not any(kind == "ConfigMap" and "dashboard" in name for kind, name in upgraded)
    assert fake.secrets() == secrets, "an upgrade must not lock callers out"

    fake.helm("rollback", "1")
    assert set(fake.stored()) == set(installed)
    assert fake.stored()["Deployment", router]["spec"] == installed["Deployment", router]["spec"]
    assert fake.secrets() == secrets

    assert re.search(r"Phase:\s+Succeeded", fake.helm("test", "--timeout", "30s"))

    fake.helm("uninstall")
    left = {key for key, found in fake.stored().items() if not is_hook(found)}
    assert left == {key for key, found in installed.items() if is_kept(found)}
    assert {kind for kind, _ in left} == {"PersistentVolumeClaim"}, "what took hours to download stays"


def test_a_test_pod_that_fails_fails_helm_test_on_the_fake(fake: Fake) -> None:
    fake.install()
    hooks = [m["metadata"]["name"] for m in render() if is_hook(m)]
    fake.kube.failing.update(hooks)
    done = fake.helm_unchecked("test", "--timeout", "30s")
    assert done.returncode != 0
    assert hooks[0] in done.stdout + done.stderr


def test_installing_again_takes_the_claim_that_was_kept_on_the_fake(fake: Fake) -> None:
    fake.install()
    fake.helm("uninstall")
    fake.install()
    assert any(kind == "PersistentVolumeClaim" for kind, _ in fake.stored())


@pytest.mark.parametrize("case", CASES)
def test_each_example_installs_on_the_fake(case: str, fake: Fake) -> None:
    notes = fake.install(*(() if case == DEFAULTS else ("-f", CHART / "examples" / f"{case}.yaml")))
    expected = {(m["kind"], m["metadata"]["name"]) for m in render(case) if not is_hook(m)}
    assert set(fake.stored()) == expected
    values = values_of(case)
    assert (values["model"]["servedName"] or values["model"]["name"]) in notes
    assert values["auth"]["existingSecret"] in notes
    assert all(f"https://{host}/v1" in notes for host in values["ingress"]["hosts"]), "where it is, with its TLS"


def test_an_upgrade_may_change_how_many_gpus_are_claimed_on_the_fake(fake: Fake) -> None:
    """A ResourceClaimTemplate cannot be changed; what pods name must be another."""
    fake.install("--set", "gpu.mode=dra")
    before = {name for kind, name in fake.stored() if kind == "ResourceClaimTemplate"}
    fake.helm("upgrade", CHART, "--set", "gpu.mode=dra,model.tensorParallel=4,draft.memoryGb=8,engine.shmSize=8Gi")
    after = {name for kind, name in fake.stored() if kind == "ResourceClaimTemplate"}
    assert len(before) == len(after) == 1
    assert before != after
    fake.helm("upgrade", CHART, "--set", "gpu.mode=dra,model.tensorParallel=4")
    assert after == {name for kind, name in fake.stored() if kind == "ResourceClaimTemplate"}, "the claim is the same"


def test_an_upgrade_changes_nothing_that_cannot_be_changed_on_the_fake(fake: Fake) -> None:
    fake.install()
    for case in CASES[1:]:
        keep = (
            "--set",
            "weights.existingClaim=,weights.readOnly=false,weights.size=200Gi,weights.accessMode=ReadWriteOnce",
        )
        fake.helm("upgrade", CHART, "-f", CHART / "examples" / f"{case}.yaml", *keep, "--set", "engine.replicas=1")
    refused = fake.helm_unchecked("upgrade", CHART, "--set", "weights.accessMode=ReadWriteMany")
    assert refused.returncode != 0, "the control"
    assert "immutable" in refused.stderr


def test_an_older_helm_installs_and_uninstalls_on_the_fake(fake: Fake) -> None:
    fake.install(version=chart_tools.OLDER_HELM)
    assert set(fake.stored()) == {(m["kind"], m["metadata"]["name"]) for m in render() if not is_hook(m)}
    fake.helm("uninstall", version=chart_tools.OLDER_HELM)
    assert {kind for kind, _ in fake.stored()} == {"PersistentVolumeClaim"}


def test_what_a_server_refuses_the_fake_refuses(fake: Fake) -> None:
    """The control: a key that no schema of the chart's looks at, in an object that Kubernetes does."""
    faulty = ("--set-json", 'router.affinity={"podAffinitee": {}}')
    done = fake.helm_unchecked("install", CHART, "--create-namespace", *faulty)
    assert done.returncode != 0
    assert "podAffinitee" in done.stderr


def test_the_notes_commands_work_on_the_fake(fake: Fake) -> None:
    notes = fake.install().partition("NOTES:")[2]
    assert "port-forward" in notes
    assert "/v1" in notes
    reads = re.findall(r"kubectl.* get secret .*?-o[ =]\S+", notes)
    assert reads, "how to read the key"
    for line in reads:
        encoded = fake.kubectl(*[word.strip("'\"") for word in line.split()[1:]])
        key = base64.b64decode(encoded).decode()
        assert len(key.strip()) >= 20
        assert key not in notes
    for kind, name in re.findall(r"\b(svc|service|deployment|deploy|statefulset|sts)/(\S+)", notes):
        long = {"svc": "Service", "service": "Service", "deploy": "Deployment", "sts": "StatefulSet"}
        kind = long.get(kind, {"deployment": "Deployment", "statefulset": "StatefulSet"}.get(kind, kind))
        assert (kind, name) in fake.stored(), f"{kind}/{name}"


def is_hook(manifest: Json) -> bool:
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def is_kept(manifest: Json) -> bool:
    return manifest["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
