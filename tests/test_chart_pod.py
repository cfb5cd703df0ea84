"""The cpu-demo's pods, as the chart renders them, run by podman: images, arguments, variables, mounts and security
context are the chart's own; a node's network, and what a cluster fills in, are made up."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import image_kit
from chart_kit import NAMESPACE, Pod, render
from chart_services import arguments, environment
from image_kit import Container

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(bool(image_kit.missing()), reason=f"needs {', '.join(image_kit.missing())}"),
]
EXAMPLE = "cpu-demo"
SECRETS = {"specdec-api-keys": {"api-keys": "demo-key"}, "specdec-control": {"secret": "demo-secret"}}


class FakeNode:
    """Runs the containers of pods with podman, all in one network namespace."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._hosts = folder, folder / "hosts"
        self._hosts.write_text(f"127.0.0.1 localhost specdec-engine.{NAMESPACE}.svc specdec-router\n")
        self._hosts.chmod(0o644)
        self._volumes: dict[tuple[str, str], str] = {}
        self.memory: list[Path] = []
        self.containers: list[Container] = []

    def start(self, pod: Pod, name: str, image: str, **changed: str) -> Container:
        """Starts a container; `changed` replaces texts in its arguments that only a cluster could give a meaning."""
        spec, container = pod.spec, pod.container(name)
        security = spec["securityContext"] | container["securityContext"]
        assert security.pop("runAsNonRoot")
        assert security.pop("seccompProfile") == {"type": "RuntimeDefault"}  # podman's default
        assert security.pop("allowPrivilegeEscalation") is False
        assert security.pop("readOnlyRootFilesystem") is True
        assert security.pop("capabilities") == {"drop": ["ALL"]}
        group = security.pop("fsGroup")
        user = f"{security.pop('runAsUser')}:{security.pop('runAsGroup')}"
        assert security.keys() == {"fsGroupChangePolicy"}
        options = [*image_kit.RESTRICTED, "--user", user, "--group-add", str(group)]
        options += ["--volume", f"{self._hosts}:/etc/hosts:ro"]
        for mount in container.get("volumeMounts", ()):
            options += ["--volume", f"{self._volume(pod, mount['name'])}:{mount['mountPath']}{self._mode(mount)}"]
        for key, value in environment(pod, container).items():
            options += ["--env", f"{key}={changed.get(value, value)}"]
        shared = self.containers[0].name if self.containers else ""
        if shared:
            options += ["--network", f"container:{shared}"]
        if shared and spec.get("shareProcessNamespace"):
            options += ["--pid", f"container:{shared}"]
        words = arguments(pod, container)
        for old, new in changed.items():
            words = [word.replace(old, new) for word in words]
        self.containers.append(Container(image, *words, options=options))
        return self.containers[-1]

    def stop(self) -> None:
        for container in reversed(self.containers):
            container.__exit__(None, None, None)
        for folder in self.memory:
            subprocess.run(["umount", folder], check=True)

    @staticmethod
    def _mode(mount: dict[str, Any]) -> str:
        return ":ro" if mount.get("readOnly") else ""

    def _volume(self, pod: Pod, name: str) -> str:
        """The folder that stands for a pod's volume, made when it is first mounted."""
        key = (pod.name, name)
        if key in self._volumes:
            return self._volumes[key]
        (volume,) = (volume for volume in pod.spec["volumes"] if volume["name"] == name)
        folder = self._folder / f"{len(self._volumes)}-{name}"
        folder.mkdir(parents=True)
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
            self.memory.append(folder)
        folder.chmod(0o777)  # as an emptyDir; of a Secret, the group's with fsGroup
        if "secret" in volume:
            for file, text in SECRETS[volume["secret"]["secretName"]].items():
                (folder / file).write_text(text)
        else:
            assert volume.keys() == {"name", "emptyDir"}
        self._volumes[key] = str(folder)
        return str(folder)


@pytest.fixture
def fake_node(tmp_path: Path) -> Iterator[FakeNode]:
    node = FakeNode(tmp_path)
    yield node
    node.stop()


def test_the_demos_pods_answer_a_chat_request_with_drafts_under_the_charts_security_context(fake_node, images):
    router_image, engine_image = images
    rendered = render(EXAMPLE)
    engine, router = rendered.pod_with("verifier"), rendered.pod_with("router")
    (test,) = (pod for pod in rendered.pods() if pod.is_hook)
    verifier = fake_node.start(engine, "verifier", engine_image, **{"10.0.0.7": "127.0.0.1"})
    draft = fake_node.start(engine, "draft", engine_image)
    fake_node.start(router, "router", router_image)
    health = {name: f"http://127.0.0.1:{port}" for name, port in (engine.ports() | router.ports()).items()}
    verifier.wait_for(f"{health['health']}/readyz", 300)
    draft.wait_for(f"{health['draft-health']}/readyz", 60)
    assert "vllm:" in verifier.request(f"{health['health']}/vllm/metrics")[1]
    assert '"up":true' in verifier.request(f"{health['health']}/readyz")[1]
    # the chart's own `helm test`, against the router's port in place of its Service's
    asking = fake_node.start(test, "check", router_image, **{"specdec-router:80": "specdec-router:8000", "240": "60"})
    assert asking.wait() == 0, f"{asking.output()}\n{fake_node.containers[2].output()}"
    assert "drafts accepted: accept length" in asking.output()
    status, _ = verifier.request(f"{health['http']}/v1/models")
    assert status == 401  # without the key
    assert verifier.terminate(grace_s=60) == 0, verifier.output()
    (shm,) = fake_node.memory
    assert not [path.name for path in shm.iterdir() if path.name.startswith("specdec-")]
