"""Classes of a user's own, named `module:Class`: drafters and step policies."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from specdec.errors import SettingsError


def make(flag: str, name: str, built_in: Sequence[str], verbs: Sequence[str], *arguments: Any) -> Any:
    """An instance of the class `name` names, made with `arguments`; modules of the current folder are found too.

    `built_in` are the names that need no class. Raises SettingsError naming the flag if there is none such, if making
    it fails, or if it lacks one of `verbs`.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise SettingsError(f"{flag} {name!r}: use one of {', '.join(built_in)}, or 'module:Class'")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        made = getattr(importlib.import_module(module), attribute)(*arguments)
    except Exception as error:  # it may be anybody's code
        where = f" (looked for in {os.getcwd()} and on PYTHONPATH)" if isinstance(error, ModuleNotFoundError) else ""
        raise SettingsError(f"{flag} {name!r}: {type(error).__name__}: {error}{where}") from error
    for verb in verbs:
        if not callable(getattr(made, verb, None)):
            raise SettingsError(f"{flag} {name!r}: the class has no method {verb!r}")
    return made
