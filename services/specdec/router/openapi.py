"""The API as a document: vLLM's own, as far as the public port passes it on, with what the router adds."""

from typing import Any

from specdec.router import routes
from specdec.router.errors import TABLE

_SPECULATIVE = {
    "description": "How many draft tokens a cycle may verify, at most.",
    "anyOf": [
        {"type": "string", "enum": ["auto", "off"]},
        {
            "type": "object",
            "properties": {"steps": {"type": "integer", "minimum": 0, "maximum": 64}},
            "required": ["steps"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ],
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "enum": sorted({kind for _, kind in TABLE.values()})},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string", "enum": sorted(TABLE)},
            },
        }
    },
}
_REQUESTS = ("ChatCompletionRequest", "CompletionRequest")


def document(engines: dict[str, Any], *, keys: bool) -> dict[str, Any]:
    """From vLLM's document; `keys`: whether a request needs an API key."""
    schemas = {**engines.get("components", {}).get("schemas", {}), "Error": _ERROR}
    for name in _REQUESTS:
        if name in schemas:
            known = schemas[name]
            schemas[name] = {**known, "properties": {**known.get("properties", {}), "speculative": _SPECULATIVE}}
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths = {
        path: {
            method: _operation(operation) if isinstance(operation, dict) else operation
            for method, operation in operations.items()
        }
        for path, operations in engines.get("paths", {}).items()
        if routes.public(path)
    }
    return {
        "openapi": engines.get("openapi", "3.1.0"),
        "info": {"title": "specdec", "version": engines.get("info", {}).get("version", "")},
        "paths": paths,
        "components": components,
        **({"security": [{"key": []}]} if keys else {}),
    }


def _operation(operation: dict[str, Any]) -> dict[str, Any]:
    """Its errors are the router's."""
    kept = {status: answer for status, answer in operation.get("responses", {}).items() if status.startswith("2")}
    error = {
        "description": "An error.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    return {**operation, "responses": {**kept, "4XX": error, "5XX": error}}
