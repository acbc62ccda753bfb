"""Checkpoints for the tests: small ones, and ones that vouch for what was put into them."""

import hashlib
from pathlib import Path

import torch

from varlap.training import checkpoint as module
from varlap.training.checkpoint import (
    write_checkpoint,
)


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert bits(tensor) == bits(other[name]), name


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().clone(memory_format=torch.contiguous_format).untyped_storage())


def write_small(path: Path, step: int = 3) -> None:
    tensors = {
        "model": {"w": torch.arange(6.0).reshape(2, 3) + step, "b": torch.zeros(2, dtype=torch.bfloat16)},
        "optimizer": {"step": torch.tensor(step)},
        "empty": {},
    }
    write_checkpoint(path, tensors, {"progress": {"step": step, "losses": [0.5, None, True]}})


def sign_again(path: Path) -> None:
    """Make a manifest that vouches for whatever the files hold now."""
    files = {}
    for file in sorted(path.iterdir()):
        if file.name != "manifest.json":
            data = file.read_bytes()
            files[file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal(path, {"format": "varlap checkpoint", "version": 1, "files": files})


def seal(path: Path, manifest: dict) -> None:
    (path / "manifest.json").write_bytes(module._sealed(manifest))
