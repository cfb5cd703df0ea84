"""Where a model's files are: a folder, a name on the Hugging Face hub, or what this package itself brings.

vLLM fetches its target itself; the draft, and the verifier for a head's config, come here. The hub's own variables
hold (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

import re
from pathlib import Path

from specdec.errors import SettingsError, SetupError
from specdec.model import demo_head, demo_model

DEMO_MODEL, DEMO_HEAD = "specdec:demo", "specdec:demo-head"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_CONFIG = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = ("*.safetensors",)


def model_folder(name: str, flag: str, *, weights: bool = True) -> Path:
    """The folder of model `name`: a folder's path, OWNER/NAME or OWNER/NAME@REVISION on the hub, `specdec:demo` or
    `specdec:demo-head`. `weights`: else only the config and the tokenizer are fetched.

    Raises SettingsError naming `flag` if there is no such model, SetupError if the hub cannot be asked.
    """
    if name == DEMO_MODEL:
        return demo_model()
    if name == DEMO_HEAD:
        return demo_head()
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    if not _HUB_NAME.fullmatch(name):
        raise SettingsError(f"{flag} {name}: there is no such folder, and it is no OWNER/NAME of the hub's either")
    return _fetched(name, flag, [*_CONFIG, *(_WEIGHTS if weights else ())])


def _fetched(name: str, flag: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    model, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=patterns))
    except RepositoryNotFoundError as error:  # also where a token is missing
        raise SettingsError(f"{flag} {name}: the hub has no such model, or HF_TOKEN may not read it") from error
    except LocalEntryNotFoundError as error:
        raise SetupError(
            f"{flag} {name}: not in the hub's cache (HF_HOME), and the hub was not reached or HF_HUB_OFFLINE is set"
        ) from error
    except HFValidationError as error:
        raise SettingsError(f"{flag} {name}: {str(error).splitlines()[0]}") from error
    except (HfHubHTTPError, OSError) as error:
        raise SetupError(f"{flag} {name}: {str(error).splitlines()[0]}") from error
