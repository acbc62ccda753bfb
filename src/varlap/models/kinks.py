"""Find activations with a kink: their curvature sits in one point, where derivatives do not see it."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varlap import tree

KINKED_MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.Hardtanh,  # and ReLU6, a subclass
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Threshold,
    nn.SELU,
    nn.Hardshrink,
    nn.Softshrink,
)
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

_ALWAYS_KINKED = frozenset(
    {"relu", "relu6", "leaky_relu", "prelu", "rrelu", "selu", "threshold"}
    | {"hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink"}
)
# These also serve as guards (`x.clamp_min(1e-6)`), so they count only where elements lie on both sides.
_SOMETIMES_KINKED = frozenset(
    {"abs", "absolute", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "max", "min"}
)
_KINKED_FUNCTIONS = tuple(
    getattr(home, name) for home in (F, torch, Tensor) for name in _ALWAYS_KINKED if hasattr(home, name)
)
_OWN_FOLDERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))


@dataclass(frozen=True)
class Kink:
    """One place of a network where the activation has a kink.

    Attributes:
        kind: the module's type ("ReLU") or the function's name ("relu").
        where: the module's qualified name ("layers.1"), or file and line ("model.py:42 in forward").

    >>> print(Kink("ReLU", "layers.1"))
    ReLU at layers.1
    """

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}"


def find_kinks(network: nn.Module, call: Callable[[], object] | None = None) -> list[Kink]:
    """Name the piecewise-linear activations of a network; an empty list is good news.

    With ReLU and its like the gradient of VL's means loses the activation's curvature (paper, section 4.3).

    Args:
        network: any module.
        call: runs a forward pass; it is called once, with gradients enabled. With it, function calls such as
            `F.relu(x)` are found too. What it shows not to depend on anything trainable, modules included, needs no
            derivative and is left out. Kinks made of other operations (`torch.where(x > 0, x, 0)`) and max pooling
            are not found.

    >>> from torch import nn
    >>> find_kinks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1), nn.Tanh()))
    [Kink(kind='ReLU', where='1')]
    """
    own = [(kink, module) for name, module in network.named_modules() if (kink := _own_kink(name, module)) is not None]
    if call is None:
        return [kink for kink, _ in own]
    known = {id(module): module for _, module in own}
    recorder = _KinkRecorder(known)
    with torch.enable_grad(), recorder, _depending(known) as depends:
        call()
    return [kink for kink, module in own if depends.get(id(module), True)] + recorder.kinks


@contextlib.contextmanager
def _depending(known: dict[int, nn.Module]) -> Iterator[dict[int, bool]]:
    """Tell of modules that are called whether an input, or a weight of their own, depends on something trainable."""
    depends: dict[int, bool] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = (*tree.tensors((args, kwargs)), *module.parameters())
        depends[id(module)] = depends.get(id(module), False) or any(tensor.requires_grad for tensor in entering)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in known.values()]
    try:
        yield depends
    finally:
        for hook in hooks:
            hook.remove()


def _own_kink(name: str, module: nn.Module) -> Kink | None:
    kind, where = type(module).__name__, name or "the network itself"
    if isinstance(module, KINKED_MODULES):
        return Kink(kind, where)
    if isinstance(module, nn.ELU) and module.alpha != 1:  # only then does its slope jump, from alpha to 1
        return Kink(kind, where)
    if isinstance(module, nn.RNN | nn.RNNCell) and module.nonlinearity == "relu":
        return Kink(f"{kind} with nonlinearity='relu'", where)
    if isinstance(module, TRANSFORMER_LAYERS) and module.activation in _KINKED_FUNCTIONS:
        return Kink(_kinked_name(module.activation), f"{name}.activation".lstrip("."))
    return None


def _kinked_name(function: object) -> str:
    """Reduce relu, relu_ and torch's private _threshold to one name; modules have none."""
    return getattr(function, "__name__", "").strip("_")


class _KinkRecorder(TorchFunctionMode):
    """Records calls of kinked functions; those made inside the modules already known are left out."""

    def __init__(self, known: dict[int, nn.Module]) -> None:
        super().__init__()
        self._known = known
        self._found: dict[Kink, None] = {}

    @property
    def kinks(self) -> list[Kink]:
        return list(self._found)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _kinked_name(func) in _ALWAYS_KINKED | _SOMETIMES_KINKED | {"elu"}:
            self._record(func, args, kwargs)
        return func(*args, **kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not any(tensor.requires_grad for tensor in tensors) or not _bends(func, args, kwargs):
            return
        frames = list(_frames(sys._getframe(2)))
        if not any(self._accounts_for(frame, func) for frame in frames):
            self._found[Kink(_kinked_name(func), _place(frames))] = None

    def _accounts_for(self, frame: FrameType, func: Any) -> bool:
        if frame.f_code.co_name != "forward":
            return False
        module = self._known.get(id(frame.f_locals.get("self")))
        # A transformer layer is known for its activation only; a subclass may call other functions.
        return module is not None and (not isinstance(module, TRANSFORMER_LAYERS) or func is module.activation)


def _bends(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether this call has a kink between the elements it is given."""
    name = _kinked_name(func)
    if name in _ALWAYS_KINKED:
        return True
    if name == "elu":
        return (args[1] if len(args) > 1 else kwargs.get("alpha", 1)) != 1
    if name in ("max", "min") and not any(isinstance(value, Tensor) for value in (*args[1:], kwargs.get("other"))):
        return False  # a reduction, not an activation
    args, kwargs = tuple(map(_detached, args)), {key: _detached(value) for key, value in kwargs.items()}
    before = (args[0] if args else kwargs["input"]).clone()  # the function may work in place
    try:
        changed = func(*args, **kwargs) != before
        return bool(changed.any()) and not bool(changed.all())
    except RuntimeError:  # inside vmap values cannot be looked at; better one name too many
        return True


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frames: list[FrameType]) -> str:
    outside = (frame for frame in frames if not frame.f_code.co_filename.startswith(_OWN_FOLDERS))
    frame = next(outside, frames[-1])
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
