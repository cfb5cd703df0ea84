"""Which tokens a folder's ids stand for, where it says so."""

import logging
from pathlib import Path

from transformers import AutoTokenizer

log = logging.getLogger(__name__)
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def vocabulary_of(*folders: Path) -> dict[str, int] | None:
    """`get_vocab()` of the first of `folders` with a tokenizer. None, with a warning, if there is none."""
    for folder in folders:
        if any((folder / name).is_file() for name in _FILES):
            vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
            return vocabulary
    log.warning("%s has no tokenizer: whether its token ids are the target's is not checked", folders[0])
    return None
