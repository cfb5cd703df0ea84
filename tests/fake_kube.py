"""A fake Kubernetes API in memory, on loopback, enough for helm 4 and kubectl: discovery, create, read, update, delete,
server-side apply, merge patch, watch, label selectors, and helm's release Secrets in protobuf.

Objects are checked strictly against the kinds' schemas, as a real server does. Nothing else happens to them: there are
no controllers and no admission, no pod runs, and a Deployment or Job has all its replicas as soon as it is stored.
Server-side apply takes what is applied for the whole object, since nobody but helm owns fields here.
"""

import base64
import contextlib
import functools
import http.server
import itertools
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import yaml

import kube_schemas

Json = dict[str, Any]
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_OBJECT = re.compile(
    r"/(?:api/(v1)|apis/([^/]+/[^/]+))(?:/namespaces/([^/]+)(?=/))?/([^/]+)(?:/([^/]+))?(?:/(status|scale))?"
)
_GROUP = re.compile(r"(?:/openapi/v3)?/(?:api/(v1)|apis/([^/]+/[^/]+))")


class Resource(NamedTuple):
    api_version: str
    kind: str
    plural: str
    namespaced: bool = True


RESOURCES = [
    *(Resource("v1", kind, f"{kind.lower()}s") for kind in ("Pod", "Service", "Secret", "ConfigMap", "ServiceAccount")),
    Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    Resource("v1", "Event", "events"),
    Resource("v1", "Endpoints", "endpoints"),
    Resource("v1", "Namespace", "namespaces", namespaced=False),
    Resource("v1", "Node", "nodes", namespaced=False),
    Resource("discovery.k8s.io/v1", "EndpointSlice", "endpointslices"),
    *(
        Resource("apps/v1", kind, f"{kind.lower()}s")
        for kind in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
    ),
    Resource("batch/v1", "Job", "jobs"),
    Resource("batch/v1", "CronJob", "cronjobs"),
    Resource("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Resource("networking.k8s.io/v1", "Ingress", "ingresses"),
    Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Resource("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Resource("resource.k8s.io/v1", "ResourceClaim", "resourceclaims"),
    Resource("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates"),
    Resource("resource.k8s.io/v1", "DeviceClass", "deviceclasses", namespaced=False),
    *(
        Resource("monitoring.coreos.com/v1", kind, f"{kind.lower()}s")
        for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    ),
]
IMMUTABLE = {
    "StatefulSet": [
        ("spec", name) for name in ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")
    ],
    "Deployment": [("spec", "selector")],
    "PersistentVolumeClaim": [("spec", name) for name in ("accessModes", "storageClassName", "volumeName")],
    "ResourceClaimTemplate": [("spec",)],
    "Service": [("spec", "clusterIP")],
}
GROUPS = sorted({resource.api_version for resource in RESOURCES})


class Key(NamedTuple):
    api_version: str
    plural: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Event:
    """One change, for watches."""

    revision: int
    type: str
    key: Key
    object: Json


class ApiError(Exception):
    def __init__(self, code: HTTPStatus, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            **{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"},
            **{"message": message, "reason": reason, "code": int(code)},
        }


class FakeKube:
    """The objects, and what was asked for. `kubernetes` is the version it says it is, such as 1.34."""

    def __init__(self, kubernetes: str = "1.34") -> None:
        self.kubernetes = kubernetes
        self.objects: dict[Key, Json] = {}
        self.events: list[Event] = []
        self.calls: list[tuple[str, str]] = []  # method, path
        self.failing: set[str] = set()  # pods that end with an error, by name
        self.changed = threading.Condition()
        self._revisions = itertools.count(1)
        for name in ("default", "kube-system"):
            self.put(
                Key("v1", "namespaces", "", name), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            )

    @contextlib.contextmanager
    def serving(self, folder: Path) -> Iterator[Path]:
        """Serves until the block ends. Gives a kubeconfig in `folder`."""
        handler = type("Handler", (_Handler,), {"kube": self})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        path = folder / "kubeconfig"
        path.write_text(json.dumps(_kubeconfig(server.server_port)))
        try:
            yield path
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def revision(self) -> int:
        return self.events[-1].revision if self.events else 0

    def put(self, key: Key, new: Json) -> Json:
        old = self.objects.get(key)
        metadata = new["metadata"]
        created = {"uid": str(uuid.uuid4()), "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        metadata |= {name: (old or {}).get("metadata", {}).get(name, value) for name, value in created.items()}
        before = old["metadata"]["generation"] if old else 0
        metadata["generation"] = before + (old is None or old.get("spec") != new.get("spec"))
        self._record("MODIFIED" if old else "ADDED", key, new)
        _settle(new, fails=key.name in self.failing)
        self.objects[key] = new
        return new

    def delete(self, key: Key) -> None:
        self._record("DELETED", key, self.objects.pop(key))

    def _record(self, kind: str, key: Key, changed: Json) -> None:
        with self.changed:
            revision = next(self._revisions)
            changed["metadata"]["resourceVersion"] = str(revision)
            self.events.append(Event(revision, kind, key, changed))
            self.changed.notify_all()

    def check(self, new: Json) -> None:
        try:
            found = kube_schemas.faults({k: v for k, v in new.items() if k != "status"}, self.kubernetes)
        except kube_schemas.UnknownKind as error:
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", f"no schema for {error}") from error
        if found:
            message = f"{new['kind']} {new['metadata']['name']!r} is invalid: {'; '.join(found)}"
            raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", message)


def _settle(new: Json, fails: bool) -> None:
    """Fills in what controllers and the server's defaults would, as far as clients wait for it."""
    kind, spec = new["kind"], new.get("spec") or {}
    if kind in ("Deployment", "StatefulSet", "ReplicaSet"):
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas", "currentReplicas")
        conditions = [
            {"type": "Available", "status": "True", "reason": "Fake"},
            {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
        ]
        observed = {"observedGeneration": new["metadata"]["generation"], "conditions": conditions}
        new["status"] = observed | dict.fromkeys(counts, spec.get("replicas", 1))
    elif kind == "Pod":
        phase = "Failed" if fails else "Succeeded" if spec.get("restartPolicy") == "Never" else "Running"
        new["status"] = {"phase": phase, "conditions": [{"type": "Ready", "status": "True", "reason": "PodCompleted"}]}
    elif kind == "Job":
        new["status"] = {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}
    elif kind == "PersistentVolumeClaim":
        new["status"] = {"phase": "Bound"}
    elif kind == "Service":
        spec.setdefault("type", "ClusterIP")
        for port in spec.get("ports", []):
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port["port"])


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms a call
    kube: FakeKube

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.kube.calls.append((self.command, self.path))
        try:
            answer = self._discovery(url.path.rstrip("/"))
            code = HTTPStatus.OK
            if answer is None:
                with self.kube.changed:
                    code, answer = self._object(url.path.rstrip("/"), query, body)
            if answer is not None:
                self._send(code, answer)
        except ApiError as error:
            self._send(HTTPStatus(error.status["code"]), error.status)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _send(self, code: HTTPStatus, content: Json) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    # ---- what there is

    def _discovery(self, path: str) -> Json | None:
        major, minor = self.kube.kubernetes.split(".")
        fixed = {
            "/version": {"major": major, "minor": minor, "gitVersion": f"v{self.kube.kubernetes}.0"},
            **{path: {} for path in ("/readyz", "/healthz", "/livez")},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(g) for g in GROUPS if "/" in g]},
            "/openapi/v3": {"paths": {_root(g): {"serverRelativeURL": f"/openapi/v3/{_root(g)}"} for g in GROUPS}},
        }
        if path in fixed:
            return fixed[path]
        found = _GROUP.fullmatch(path)
        if not found:
            return None
        group = found[1] or found[2]
        if path.startswith("/openapi/v3"):
            return _openapi(group)
        resources = [
            {
                "name": r.plural,
                "singularName": r.kind.lower(),
                "namespaced": r.namespaced,
                "kind": r.kind,
                "verbs": VERBS,
            }
            for r in RESOURCES
            if r.api_version == group
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}

    # ---- objects

    def _object(self, path: str, query: dict[str, str], body: bytes) -> tuple[HTTPStatus, Json | None]:
        found = _OBJECT.fullmatch(path)
        resource = next(
            (r for r in RESOURCES if found and (found[1] or found[2], found[4]) == (r.api_version, r.plural)), None
        )
        if not found or not resource:
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", "the server could not find the requested resource")
        key = Key(resource.api_version, resource.plural, found[3] or "", found[5] or "")
        current = self.kube.objects.get(key)
        if self.command == "GET" and not key.name:
            wanted = _filter(key, query)
            if query.get("watch") in ("true", "1"):
                return HTTPStatus.OK, self._watch(resource, wanted, query)
            items = [item for one, item in self.kube.objects.items() if wanted(one, item)]
            listed = {"metadata": {"resourceVersion": str(self.kube.revision)}, "items": items}
            return HTTPStatus.OK, {"kind": f"{resource.kind}List", "apiVersion": key.api_version, **listed}
        if self.command in ("GET", "DELETE") and current is None:
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", f'{key.plural} "{key.name}" not found')
        if self.command == "GET":
            return HTTPStatus.OK, current
        if self.command == "DELETE":
            if "dryRun" not in query:
                self.kube.delete(key)
            return HTTPStatus.OK, {"kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {}}
        return self._write(resource, key, _decode(body), dry="dryRun" in query, is_status=found[6] == "status")

    def _write(
        self, resource: Resource, key: Key, sent: Json, dry: bool, is_status: bool
    ) -> tuple[HTTPStatus, Json | None]:
        if self.command == "POST":
            key = key._replace(name=sent.get("metadata", {}).get("name", ""))
        current = self.kube.objects.get(key)
        applied = "apply-patch" in self.headers.get("Content-Type", "")
        if self.command == "POST" and current:
            raise ApiError(HTTPStatus.CONFLICT, "AlreadyExists", f'{key.plural} "{key.name}" already exists')
        if self.command == "PATCH" and not current and not applied:
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", f'{key.plural} "{key.name}" not found')
        if resource.namespaced and not key.namespace:
            raise ApiError(HTTPStatus.BAD_REQUEST, "BadRequest", "namespace required")
        new = _merged(current or {}, sent) if self.command == "PATCH" and not applied else sent
        new = {"apiVersion": key.api_version, "kind": resource.kind, **new}
        new["metadata"] = {**new.get("metadata", {}), "name": key.name}
        if current:
            _refuse_change(current, new)
        if resource.namespaced:
            new["metadata"]["namespace"] = key.namespace
        if not is_status:
            self.kube.check(new)
        return HTTPStatus.OK if current else HTTPStatus.CREATED, new if dry else self.kube.put(key, new)

    def _watch(self, resource: Resource, wanted: Callable[[Key, Json], bool], query: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        since = int(query.get("resourceVersion") or 0)
        initial = query.get("sendInitialEvents") == "true"
        end = time.monotonic() + min(float(query.get("timeoutSeconds", 60)), 60)
        with contextlib.suppress(OSError):  # the client has seen enough
            if not since or initial:
                for key, item in list(self.kube.objects.items()):
                    if wanted(key, item):
                        self._chunk("ADDED", item)
                since = self.kube.revision
            if initial:
                ended = {"resourceVersion": str(since), "annotations": {"k8s.io/initial-events-end": "true"}}
                self._chunk("BOOKMARK", {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": ended})
            while time.monotonic() < end:
                for event in [event for event in self.kube.events if event.revision > since]:
                    since = event.revision
                    if wanted(event.key, event.object):
                        self._chunk(event.type, event.object)
                self.kube.changed.wait(0.5)
            self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, kind: str, content: Json) -> None:
        line = json.dumps({"type": kind, "object": content}).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()


def _filter(among: Key, query: dict[str, str]) -> Callable[[Key, Json], bool]:
    """Whether an object is in the collection `among` and has the query's labels and name."""
    words = query.get("labelSelector", "").split(",")
    labels = dict(word.split("=", 1) for word in words if re.fullmatch(r"[^!=]+=[^=]*", word))
    name = re.search(r"metadata.name=([^,]+)", query.get("fieldSelector", ""))

    def wanted(key: Key, item: Json) -> bool:
        of_it = key[:2] == among[:2] and among.namespace in ("", key.namespace)
        return (
            of_it
            and labels.items() <= (item["metadata"].get("labels") or {}).items()
            and (not name or key.name == name[1])
        )

    return wanted


def _refuse_change(old: Json, new: Json) -> None:
    """Raises ApiError where `new` changes what a server lets nobody change."""
    for field in IMMUTABLE.get(old["kind"], ()):
        before, after = (functools.reduce(lambda node, name: node.get(name, {}), field, one) for one in (old, new))
        if before != after:
            message = f"{old['kind']} {old['metadata']['name']!r} is invalid: {'.'.join(field)}: field is immutable"
            raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", message)


def _merged(old: Any, new: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    merged = {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return {key: value for key, value in merged.items() if value is not None}


# ---- discovery's documents


def _root(api_version: str) -> str:
    return "api/v1" if api_version == "v1" else f"apis/{api_version}"


def _group(api_version: str) -> Json:
    name, version = api_version.split("/")
    served = {"groupVersion": api_version, "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _openapi(api_version: str) -> Json:
    """Just enough for a client to leave the validation of fields to the server."""
    group, _, version = api_version.rpartition("/")
    names = ("dryRun", "fieldManager", "fieldValidation", "force")
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
    paths = {}
    for resource in RESOURCES:
        if resource.api_version == api_version:
            place = "namespaces/{namespace}/" if resource.namespaced else ""
            patch = {
                "parameters": parameters,
                "responses": {},
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": {"group": group, "kind": resource.kind, "version": version},
            }
            paths[f"/{_root(api_version)}/{place}{resource.plural}/{{name}}"] = {"patch": patch}
    info = {"title": "fake", "version": "v1"}
    return {"openapi": "3.0.0", "info": info, "components": {"schemas": {}}, "paths": paths}


def _kubeconfig(port: int) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "fake", "user": {}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "current-context": "fake",
    }


# ---- bodies: YAML, JSON, and Kubernetes' protobuf for the one kind that helm sends in it


def _decode(body: bytes) -> Json:
    if not body.startswith(b"k8s\0"):
        content: Json = yaml.load(body, yaml.CSafeLoader) or {}
        return content
    unknown = _fields(body[4:])  # runtime.Unknown: 1 type, 2 raw
    kind = _text(_fields(unknown[1][0]), 2)
    if kind == "DeleteOptions":
        return {}
    if kind != "Secret":
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", f"protobuf {kind}")
    secret = _fields(unknown[2][0])  # 1 metadata, 2 data, 3 type
    metadata = _fields(secret[1][0])  # 1 name, 3 namespace, 11 labels, 12 annotations
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": _text(metadata, 1),
            "namespace": _text(metadata, 3),
            "labels": {key: value.decode() for key, value in _map(metadata, 11)},
            "annotations": {key: value.decode() for key, value in _map(metadata, 12)},
        },
        "data": {key: base64.b64encode(value).decode() for key, value in _map(secret, 2)},
        "type": _text(secret, 3),
    }


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Protobuf's wire format: values by field number; varints and byte strings only."""
    fields: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            value: Any = varint()
        elif key & 7 == 2:
            length = varint()
            value = message[at : at + length]
            at += length
        else:
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", f"protobuf wire type {key & 7}")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _text(message: dict[int, list[Any]], field: int) -> str:
    return str(message.get(field, [b""])[0].decode())


def _map(message: dict[int, list[Any]], field: int) -> Iterator[tuple[str, bytes]]:
    for entry in map(_fields, message.get(field, [])):
        yield _text(entry, 1), entry.get(2, [b""])[0]
