"""What the chart starts the services with: arguments and variables as a container gets them, and what the program and
vLLM make of them."""

import ast
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from chart_kit import CHART, NAMESPACE, Json, Pod
from specdec.check import CheckSettings
from specdec.cli import split_extra
from specdec.draft.settings import DraftSettings
from specdec.errors import SpecdecError
from specdec.router.settings import RouterSettings
from specdec.settings import Settings
from specdec.stack import UpSettings
from specdec.verifier.settings import VerifierSettings

POD_IP = "10.0.0.7"
COMMANDS: dict[str, type[Settings]] = {
    "router": RouterSettings,
    "verifier": VerifierSettings,
    "draft": DraftSettings,
    "check": CheckSettings,
}
OTHER_VARIABLES = {"SPECDEC_CACHE", "SPECDEC_CONFIG", "SPECDEC_LOG_FORMAT", "SPECDEC_LOG_LEVEL"}
STAGES = ("router", "engine", "engine-cpu")  # of the Dockerfile, each an image
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


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


def settings_of(pod: Pod, container: Json) -> Any:
    """What a service makes of a container's arguments and variables. Fails where it would refuse to start."""
    command, *rest = arguments(pod, container)
    variables = {k: v for k, v in environment(pod, container).items() if k.startswith("SPECDEC_")}
    ours, _ = split_extra(rest)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
            patch.delenv(name)
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


def known_variable(name: str) -> None:
    """Fails for a variable with the program's prefix that it does not read: nobody else would say so."""
    if not name.startswith("SPECDEC_") or name in OTHER_VARIABLES:
        return
    kinds = [*COMMANDS.values(), UpSettings]
    fields = {kind.model_config["env_prefix"] + field.upper() for kind in kinds for field in kind.model_fields}
    assert name in fields, f"there is no setting {name}"


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


def image_stage(container: str, values: Json) -> str:
    """Which stage is the container's image."""
    if container in ("router", "check"):
        return "router"
    return "engine-cpu" if values["gpu"]["mode"] == "cpu" else "engine"


def image_variables(stage: str) -> dict[str, str]:
    """What the Dockerfile sets in one stage, PATH aside."""
    blocks = re.findall(r"^ENV ((?:.*\\\n)*.*)$", image_stages().get(stage, ""), re.MULTILINE)
    pairs = [word.partition("=") for block in blocks for word in block.replace("\\\n", " ").split()]
    return {name: value for name, _, value in pairs if name != "PATH"}


def image_entrypoint(stage: str) -> list[str]:
    found = re.findall(r"^ENTRYPOINT (\[.*\])$", image_stages()[stage], re.MULTILINE)
    words: list[str] = json.loads(found[-1])
    return words


def image_stages() -> dict[str, str]:
    """The Dockerfile's stages by name."""
    text = (CHART.parent / "Dockerfile").read_text()
    parts = re.split(r"^FROM .* AS (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
