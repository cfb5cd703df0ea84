"""Named tensors of a model folder, read one by one: a head needs its target's embeddings, not the target."""

import json
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open

from specdec.errors import CheckpointError


def computed_in(dtype: str) -> torch.dtype:
    """What `--dtype` computes in: with fp8 only the weights are float8, all else is bfloat16."""
    kind: torch.dtype = getattr(torch, "bfloat16" if dtype == "fp8" else dtype)
    return kind


class Weights:
    """The tensors of a transformers folder: `model.safetensors`, or the shards of `model.safetensors.index.json`.

    `device` and `dtype` are what `take` returns; integer and boolean tensors keep theirs. With `float8` who takes the
    weights of a linear map is to keep them as that.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, *, float8: bool = False) -> None:
        self.folder, self.device, self.dtype, self.float8 = folder, device, dtype, float8
        self._files = {name: (path, name) for name, path in _files(folder).items()}  # file, and the name in it

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> Iterable[str]:
        return self._files.keys()

    def like(self, folder: Path) -> Self:
        """Another folder's tensors, for the same device and dtype."""
        return type(self)(folder, self.device, self.dtype, float8=self.float8)

    def renamed(self, rename: Callable[[str], str]) -> Self:
        """The same tensors under other names."""
        same = copy(self)
        same._files = {rename(name): place for name, place in self._files.items()}
        return same

    def take(self, *names: str) -> torch.Tensor:
        """The first of `names` that is there. Raises CheckpointError if none is."""
        for name in names:
            if name in self._files:
                path, there = self._files[name]
                with safe_open(path, framework="pt") as file:
                    tensor = file.get_tensor(there)
                dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
                return tensor.to(device=self.device, dtype=dtype)
        raise CheckpointError(f"{self.folder} has no tensor {' or '.join(names)}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, read from the file's header."""
        path, there = self._files[name]
        with safe_open(path, framework="pt") as file:
            return tuple(file.get_slice(there).get_shape())


def _files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        found = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        if missing := sorted({path.name for path in found.values() if not path.exists()}):
            raise CheckpointError(f"{folder}: its index names {', '.join(missing)}, which are not there")
        return found
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        why = "only a pytorch_model.bin, which is not read" if list(folder.glob("*.bin")) else "no .safetensors file"
        raise CheckpointError(f"{folder} has {why}")
    return found
