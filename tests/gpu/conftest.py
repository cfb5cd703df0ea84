"""Triton comes with torch's CUDA build; where it is missing these tests are not even collected, so none is skipped."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other tests' models and fakes
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
