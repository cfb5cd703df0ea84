"""Manifests against schemas, strictly: Kubernetes' own kinds by version, and the Prometheus operator's. A key that a
kind does not have is a fault, and so is a kind or a version that nobody has a schema for."""

import functools
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import referencing

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import chart_tools

Json = dict[str, Any]


class UnknownKind(Exception):
    """There is no schema for it."""


def faults(manifest: Json, kubernetes: str) -> list[str]:
    """What is wrong with it under that version (such as 1.34); empty where it is valid. Raises UnknownKind."""
    return [
        f"{error.json_path}: {error.message[:300]}" for error in _validator(manifest, kubernetes).iter_errors(manifest)
    ]


def versions() -> list[str]:
    """Every Kubernetes version there are schemas for, oldest first."""
    folders = {name.split("/")[2] for name in _members() if name.endswith("-strict/_definitions.json")}
    return sorted((folder[1:].rpartition(".0-local")[0] for folder in folders), key=_numbers)


def _validator(manifest: Json, kubernetes: str) -> jsonschema.Draft202012Validator:
    api_version, kind = manifest["apiVersion"], manifest["kind"]
    if api_version == "monitoring.coreos.com/v1":
        return _custom(kind)
    return _builtin(api_version, kind, kubernetes)


@functools.cache
def _builtin(api_version: str, kind: str, kubernetes: str) -> jsonschema.Draft202012Validator:
    group, _, version = api_version.rpartition("/")
    file = "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part)
    folder = f"kubernetes_validate/kubernetes-json-schema/v{kubernetes}.0-local-strict"
    if f"{folder}/{file}.json" not in _members():
        raise UnknownKind(f"{api_version} {kind} in Kubernetes {kubernetes}")
    schema = json.loads(_archive().read(f"{folder}/{file}.json"))
    return jsonschema.Draft202012Validator(schema, registry=_definitions(folder))


@functools.cache
def _custom(kind: str) -> jsonschema.Draft202012Validator:
    path = chart_tools.crds_path() / f"{kind}.json"
    if not path.is_file():
        raise UnknownKind(f"monitoring.coreos.com/v1 {kind}")
    schema = _closed(json.loads(path.read_text()))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def _closed(schema: Any) -> Any:
    """The schema with no keys allowed but those it names."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            _closed(value)
    elif isinstance(schema, list):
        for value in schema:
            _closed(value)
    return schema


@functools.cache
def _definitions(folder: str) -> "referencing.Registry[Any]":
    content = json.loads(_archive().read(f"{folder}/_definitions.json"))
    return referencing.Resource.from_contents(content) @ referencing.Registry()  # under the $id that kinds refer to


@functools.cache
def _archive() -> zipfile.ZipFile:
    return zipfile.ZipFile(chart_tools.schemas_path())


@functools.cache
def _members() -> frozenset[str]:
    return frozenset(_archive().namelist())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
