#!/usr/bin/env bash
# Renews requirements/lock.txt from the .in files and pyproject.toml, for every Python and machine the project names.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m pip install -q uv
"$python" -m uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header \
    --override requirements/overrides.in requirements/engine.in requirements/dev.in pyproject.toml \
    | grep -v "sys_platform == 'never'" > requirements/lock.txt
