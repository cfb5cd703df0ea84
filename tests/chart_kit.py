"""Renders the chart and looks things up in what comes out: manifests, pods, containers, references."""

import functools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import chart_golden as chart_golden  # tests reach both through here
import chart_tools
from chart_golden import CHART, DEFAULTS, EXAMPLES, MONITORING, NAMESPACE

if chart_tools.missing():
    pytest.skip("helm is not installed: run `make chart` once", allow_module_level=True)

Json = dict[str, Any]
RELEASE = "specdec"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
CASES = [DEFAULTS, *(path.stem for path in EXAMPLES)]
each_case = pytest.mark.parametrize("case", CASES)


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

    def one(self, kind: str) -> Json:
        (found,) = self.of(kind)
        return found

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


def name_of(manifest: Json) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def values_of(case: str) -> Json:
    """The values a case is rendered with."""
    if case == DEFAULTS:
        return VALUES
    return merged(VALUES, yaml.safe_load((CHART / "examples" / f"{case}.yaml").read_text()))


def merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}


def strings(node: Any) -> list[str]:
    return [value for _, value in walk(node) if isinstance(value, str)]


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


def volume_of(pod: Pod, mount: Json) -> Json:
    return next((volume for volume in pod.spec.get("volumes", ()) if volume["name"] == mount["name"]), {})


def uses_dra(rendered: Rendered) -> bool:
    return any(manifest["apiVersion"].startswith("resource.k8s.io/") for manifest in rendered)
