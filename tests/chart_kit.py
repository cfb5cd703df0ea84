"""Renders the chart and looks things up in what comes out: manifests, pods, containers, what they are started with."""

import functools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import chart_golden as chart_golden  # tests reach both through here
import chart_tools
from chart_golden import CHART, DEFAULTS, EXAMPLES, MONITORING, NAMESPACE

Json = dict[str, Any]
RELEASE = "specdec"
POD_IP = "10.0.0.7"
CASES = [DEFAULTS, *(path.stem for path in EXAMPLES)]
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class _Loader(yaml.CSafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML's readers silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Json:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"keys {twice} stand twice", node.start_mark)
        content: Json = super().construct_mapping(node, deep)
        return content


@dataclass(frozen=True)
class Pod:
    """A pod, or the template of some."""

    owner: Json
    template: Json

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"].get("labels", {})
        return labels

    @property
    def spec(self) -> Json:
        spec: Json = self.template["spec"]
        return spec

    @property
    def is_hook(self) -> bool:
        return "helm.sh/hook" in self.owner["metadata"].get("annotations", {})

    @property
    def containers(self) -> list[Json]:
        """With those that run before the others."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def container(self, name: str) -> Json:
        return next(container for container in self.containers if container["name"] == name)

    def ports(self) -> dict[str, int]:
        """Number by name."""
        return {port["name"]: port["containerPort"] for c in self.containers for port in c.get("ports", ())}


class Rendered(list[Json]):
    """Manifests, in the order that helm writes them."""

    def of(self, kind: str) -> list[Json]:
        return [manifest for manifest in self if manifest["kind"] == kind]

    def one(self, kind: str, ending: str = "") -> Json:
        found = [manifest for manifest in self.of(kind) if manifest["metadata"]["name"].endswith(ending)]
        assert len(found) == 1, f"{len(found)} of {kind} *{ending}: {[m['metadata']['name'] for m in self.of(kind)]}"
        return found[0]

    def pods(self) -> list[Pod]:
        found = []
        for manifest in self:
            if manifest["kind"] == "Pod":
                found.append(Pod(manifest, manifest))
            elif "template" in manifest.get("spec", {}) and "containers" in manifest["spec"]["template"].get(
                "spec", {}
            ):
                found.append(Pod(manifest, manifest["spec"]["template"]))
        return found

    def pod_with(self, container: str) -> Pod:
        """The one pod, hooks aside, that has such a container."""
        found = [p for p in self.pods() if not p.is_hook and any(c["name"] == container for c in p.containers)]
        assert len(found) == 1, f"{len(found)} pods with a container {container}"
        return found[0]


def render(
    example: str = DEFAULTS,
    values: Json | None = None,
    *,
    release: str = RELEASE,
    kubernetes: str = "1.34",
    apis: tuple[str, ...] = MONITORING,
    helm: str = chart_tools.HELM,
) -> Rendered:
    """What `helm template` makes of an example's values (or none), and of `values` on top. Not to be changed."""
    return _rendered(example, json.dumps(values or {}), release, kubernetes, apis, helm)


def refusal(example: str = DEFAULTS, values: Json | None = None, **more: Any) -> str:
    """What helm says where the chart must not render."""
    options = {
        "release": RELEASE,
        "kubernetes": "1.34",
        "apis": MONITORING,
        "helm": chart_tools.HELM,
        "flags": (),
    } | more
    code, _, err = _template(example, json.dumps(values or {}), **options)
    assert code != 0, f"rendered, in spite of {values}"
    return " ".join(err.split())


@functools.cache
def _rendered(example: str, values: str, release: str, kubernetes: str, apis: tuple[str, ...], helm: str) -> Rendered:
    code, out, err = _template(example, values, release, kubernetes, apis, helm)
    assert code == 0, err
    return Rendered(manifest for manifest in yaml.load_all(out, _Loader) if manifest is not None)


@functools.cache
def _template(
    example: str,
    values: str,
    release: str,
    kubernetes: str,
    apis: tuple[str, ...],
    helm: str,
    flags: tuple[str, ...] = (),
) -> tuple[int, str, str]:
    files = () if example == DEFAULTS else ("-f", CHART / "examples" / f"{example}.yaml")
    target = ("--namespace", NAMESPACE, "--kube-version", f"{kubernetes}.0", "--api-versions", ",".join(apis))
    done = chart_tools.helm("template", release, CHART, *target, *files, "-f", "-", *flags, version=helm, stdin=values)
    return done.returncode, done.stdout, done.stderr


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a manifest, with its path; mappings and lists themselves too."""
    yield path, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in children:
        yield from walk(value, f"{path}.{key}")


def environment(pod: Pod, container: Json) -> dict[str, str]:
    """A container's variables as the first pod's container sees them; what comes from secrets is made up."""
    known: dict[str, str] = {}
    for entry in container.get("env", ()):
        if "value" in entry:
            known[entry["name"]] = expanded(str(entry["value"]), known)
        else:
            known[entry["name"]] = _from_elsewhere(pod, entry["valueFrom"])
    return known


def _from_elsewhere(pod: Pod, source: Json) -> str:
    fields = {
        "metadata.name": f"{pod.owner['metadata']['name']}-0",
        "metadata.namespace": NAMESPACE,
        "status.podIP": POD_IP,
        "status.hostIP": "10.1.0.7",
        "spec.nodeName": "node-a",
    }
    if "fieldRef" in source:
        return fields[source["fieldRef"]["fieldPath"]]
    return "1" if "resourceFieldRef" in source else "made-up"


def expanded(text: str, variables: dict[str, str]) -> str:
    """With each $(NAME) that is known filled in, as Kubernetes does."""
    return _VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)


def arguments(pod: Pod, container: Json) -> list[str]:
    """What follows the image's entry point (or stands in its place), with variables filled in."""
    variables = environment(pod, container)
    return [expanded(str(word), variables) for word in (*container.get("command", ()), *container.get("args", ()))]


_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "m": 1e-3,
}


def quantity(text: str | int | float) -> float:
    """`8Gi`, `500m` or 2 as a number."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    assert found, f"no quantity: {text!r}"
    return float(found[1]) * _SUFFIXES[found[2]]
