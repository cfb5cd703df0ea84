"""The chart as `helm template` renders it: it is valid, and what was reviewed.

No cluster is here. test_chart_fake_kube.py has the real helm against a fake API."""

import copy
import re
import tarfile
from pathlib import Path

import pytest
import yaml

import kube_schemas
import specdec
from chart_kit import (
    CHART,
    DEFAULTS,
    NAMESPACE,
    RELEASE,
    Json,
    Rendered,
    chart_golden,
    chart_tools,
    each_case,
    name_of,
    refusal,
    render,
    selects,
    uses_dra,
    walk,
)

META = yaml.safe_load((CHART / "Chart.yaml").read_text())
OLDEST = re.search(r"1\.\d+", META["kubeVersion"])[0]
NEWEST = kube_schemas.versions()[-1]
each_helm = pytest.mark.parametrize("helm", list(chart_tools.HELMS))


@each_helm
@each_case
def test_helm_lint_is_content(case: str, helm: str) -> None:
    files = () if case == DEFAULTS else ("-f", CHART / "examples" / f"{case}.yaml")
    done = chart_tools.helm("lint", "--strict", "--kube-version", "1.34.0", CHART, *files, version=helm)
    assert done.returncode == 0, done.stdout + done.stderr


@each_case
def test_an_older_helm_renders_the_same(case: str) -> None:
    assert settled(render(case, helm=chart_tools.OLDER_HELM)) == settled(render(case))


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


def test_the_images_are_of_the_program_s_version() -> None:
    assert META["appVersion"] == specdec.__version__


def test_a_package_of_the_chart_renders_the_same(tmp_path: Path) -> None:
    """Dashboards and rules are files beside the templates, which .helmignore could leave out."""
    assert chart_tools.helm("package", CHART, "-d", tmp_path).returncode == 0
    (archive,) = tmp_path.iterdir()
    target = ("--namespace", NAMESPACE, "--kube-version", "1.34.0", "--api-versions", ",".join(chart_golden.MONITORING))
    done = chart_tools.helm("template", RELEASE, archive, *target)
    assert settled(Rendered(yaml.load_all(done.stdout, yaml.CSafeLoader))) == settled(render())
    assert archive.stat().st_size < 2**20, "a release is one Secret"
    with tarfile.open(archive) as tar:
        assert "golden" not in str(tar.getnames())


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


@pytest.mark.parametrize("release", ["on", "true", "null"])
def test_a_release_named_like_a_constant_stays_a_string(release: str) -> None:
    for manifest in render(release=release):
        assert kube_schemas.faults(manifest, "1.34") == [], name_of(manifest)


def test_two_releases_share_no_name_and_no_pod() -> None:
    one, other = render(release="one"), render(release="other")
    assert not {(m["kind"], m["metadata"]["name"]) for m in one} & {(m["kind"], m["metadata"]["name"]) for m in other}
    for selector in (selector for manifest in one for selector in selectors(manifest)):
        assert not any(selects(selector, pod.labels) for pod in other.pods()), selector


# ---- what these tests look things up with


def settled(rendered: Rendered) -> list[Json]:
    """Without what each rendering makes anew."""
    return [
        manifest if manifest["kind"] != "Secret" else {**manifest, "data": sorted(manifest["data"])}
        for manifest in rendered
    ]


def selectors(manifest: Json) -> list[dict[str, str]]:
    """Every selector of pods in a manifest."""
    spec = manifest.get("spec", {})
    found = [spec["selector"]] if manifest["kind"] == "Service" else []
    found += [
        node for path, node in walk(spec) if path.endswith(".matchLabels") and manifest["kind"] != "ServiceMonitor"
    ]
    return found
