#!/usr/bin/env bash
# Renews the locks from the .in files and pyproject.toml, for every Python and machine the project names: lock.txt has
# all packages, runtime.txt the part of them that serves.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m pip install -q uv

lock() {
    "$python" -m uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header \
        --override requirements/overrides.in "$@" | grep -v "sys_platform == 'never'"
}

lock requirements/engine.in requirements/dev.in pyproject.toml > requirements/lock.txt
lock --constraint requirements/lock.txt requirements/engine.in pyproject.toml > requirements/runtime.txt
