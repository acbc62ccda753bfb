"""Documents and named tensors as bytes, and back: JSON and safetensors, which can hold no code."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor

from varlap.errors import CheckpointError

DTYPES = frozenset(  # those that safetensors both writes and reads
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}
    | {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)


def damaged(file: Path, what: str) -> CheckpointError:
    """Say which file is damaged, and how.

    >>> print(damaged(Path("model.json"), "it is empty"))
    model.json is damaged: it is empty; use another checkpoint, or a copy of this one
    """
    return CheckpointError(f"{file} is damaged: {what}; use another checkpoint, or a copy of this one")


def canonical(document: Any) -> bytes:
    r"""Return the one way to write a document, for hashes.

    >>> canonical({"b": 1, "a": "é"})
    b'{\n "a": "\\u00e9",\n "b": 1\n}\n'
    """
    return (json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def document_bytes(where: str, document: Any) -> bytes:
    r"""Write a document as JSON, its keys in their order; `where` is its name in errors.

    >>> document_bytes("progress", {"step": 3, "loss": 0.1})
    b'{\n "step": 3,\n "loss": 0.1\n}\n'
    """
    try:
        return (json.dumps(_plain(where, document), indent=1, allow_nan=False) + "\n").encode("ascii")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be written as JSON: {error}; make it smaller or flatter") from error


def _plain(where: str, value: Any) -> Any:
    """Return a value as JSON would give it back, or say which part of it JSON would change or lose."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}, but JSON's keys are text; use {str(key)!r}")
        return {key: _plain(f"{where}[{key!r}]", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{where} is {value}, which JSON has no number for; write None, or put it in a tensor")
    if value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; make it a number, text, list or dict, or pass "
        "it among the tensors"
    )


def parse_document(file: Path, data: bytes) -> Any:
    """Parse JSON, or raise `CheckpointError` with the file's name.

    >>> parse_document(Path("progress.json"), b'{"step": 3}')
    {'step': 3}
    """

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{number} is no finite number")
        return float(number)

    try:
        return json.loads(data.decode("utf-8"), parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError, MemoryError) as error:
        raise damaged(file, f"it is no JSON document ({error})") from error


def tensor_bytes(where: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Write named tensors as safetensors, wherever they are and however they lie in memory.

    >>> list(parse_tensors(Path("model"), tensor_bytes("model", {"w": torch.ones(2), "b": torch.zeros(1)})))
    ['w', 'b']
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise CheckpointError(f"{where} has the name {name!r}, which safetensors cannot hold; use another text")
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            what = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise CheckpointError(
                f"{where}[{name!r}] is {what}, which safetensors cannot hold; convert it to a dense tensor of a "
                "usual type, or write it as a document"
            )
    try:
        # Cloned, since safetensors wants plain memory that no two tensors share.
        copies = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
        }
        return safetensors.save(copies, metadata={"order": json.dumps(list(copies))})
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{where} cannot be written as safetensors: {error}; give tensors with data") from error


def parse_tensors(file: Path, data: bytes) -> dict[str, Tensor]:
    """Parse tensors in the order in which they were written, which safetensors by itself would shuffle.

    >>> parse_tensors(Path("model"), tensor_bytes("model", {"w": torch.ones(2)}))
    {'w': tensor([1., 1.])}
    """
    try:
        found = safetensors.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        order = json.loads(header["__metadata__"]["order"])
        if sorted(order) != sorted(found):
            raise ValueError("its list of names is not that of its tensors")
        return {name: found[name] for name in order}
    except Exception as error:  # whatever a parser says about foreign bytes, the bytes are at fault
        raise damaged(file, f"it is no safetensors file ({type(error).__name__}: {error})") from error
