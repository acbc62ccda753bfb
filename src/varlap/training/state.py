"""All that a run must remember between two steps, as flat tensors and plain numbers."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varlap.errors import CheckpointError
from varlap.objectives import Objective
from varlap.posterior import BNN
from varlap.training.checkpoint import Checkpoint
from varlap.training.step import GradientScale

SUMS = ("elbo", "log_likelihood", "curvature", "kl", "items", "skipped")


@dataclass
class RunState:
    """Where a run is. Random state is not part of it: every draw is determined by the seed and the step."""

    step: int = 0
    """steps taken"""
    sums: Tensor = field(default_factory=lambda: torch.zeros(len(SUMS), dtype=torch.float64))
    """over the items of the present epoch"""
    best_nll: float | None = None
    """of the validation data"""
    epochs_since_best: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    """the weights that had it"""
    stopped: bool = False
    """whether the training ended early"""
    gradient_scale: GradientScale = field(default_factory=lambda: GradientScale(1.0))
    """of half precision"""
    epoch_seconds: float = 0.0
    """time that the present epoch has taken so far"""


def to_tensors(
    bnn: BNN, optimizer: torch.optim.Optimizer, objective: Objective, state: RunState
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return what a checkpoint holds: groups of named tensors, and a document.

    >>> import varlap
    >>> bnn = BNN(torch.nn.Linear(2, 3))
    >>> tensors, document = to_tensors(bnn, varlap.adam(bnn), varlap.VL(num_data=10), RunState(step=3))
    >>> sorted(tensors), document["step"]
    (['best', 'model', 'objective', 'optimizer', 'run'], 3)
    """
    moments, scalars = {}, {}
    for index, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            (moments if isinstance(value, Tensor) else scalars)[f"{index}/{name}"] = value
    remembered = {f"{n}/{key}": t for n, r in objective.running_means().items() for key, t in r.sums.items()}
    tensors = {
        "model": bnn.state_dict(),
        "optimizer": moments,
        "objective": remembered,
        "best": state.best,
        "run": {"sums": state.sums},
    }
    document = {
        "step": state.step,
        "best_nll": state.best_nll,
        "epochs_since_best": state.epochs_since_best,
        "stopped": state.stopped,
        "gradient_scale": dataclasses.asdict(state.gradient_scale),
        "epoch_seconds": state.epoch_seconds,
        "num_calls": objective.num_calls,
        "last_step": objective.last_step,
        "optimizer": scalars,
        "strides": {name: t.stride() for name, t in remembered.items() if not t.is_contiguous()},
    }
    return tensors, document


def from_checkpoint(
    checkpoint: Checkpoint, bnn: BNN, optimizer: torch.optim.Optimizer, objective: Objective
) -> RunState:
    """Put a checkpoint's state in place, and return where the run is."""
    try:
        document, tensors = checkpoint.documents["state"], checkpoint.tensors
        bnn.load_state_dict(tensors["model"])
        entries: dict[int, dict[str, Any]] = {}
        for name, value in [*tensors["optimizer"].items(), *document["optimizer"].items()]:
            index, _, entry = name.partition("/")
            entries.setdefault(int(index), {})[entry] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
        _give_back_types(optimizer, entries)
        _lay_out_as_parameters(optimizer)
        remembered: dict[str, Any] = {name: {} for name in objective.running_means()}
        for name, total in tensors["objective"].items():
            running, _, key = name.partition("/")
            strides = document.get("strides", {}).get(name, total.stride())
            place = torch.empty_strided(total.shape, strides, dtype=total.dtype, device=bnn.device)
            remembered[running][key] = place.copy_(total)
        counts = {"num_calls": document["num_calls"], "last_step": document["last_step"]}
        objective.load_state_dict(counts | remembered)
        return RunState(
            document["step"],
            tensors["run"]["sums"].to(bnn.device),
            document["best_nll"],
            document["epochs_since_best"],
            {name: tensor.to(bnn.device) for name, tensor in tensors["best"].items()},
            document["stopped"],
            GradientScale(**document["gradient_scale"]),
            float(document["epoch_seconds"]),
        )
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint does not fit this network, objective or optimizer: {error}; choose another out"
        ) from error


def _give_back_types(optimizer: torch.optim.Optimizer, entries: dict[int, dict[str, Any]]) -> None:
    """Give what an optimizer remembers the precision that it had: torch casts it to that of the parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, saved in entries.items():
        own = optimizer.state[parameters[index]]
        for name, value in saved.items():
            if isinstance(value, Tensor) and own[name].dtype != value.dtype:
                own[name] = value.to(own[name].device)


def _lay_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the memory format of their parameters, which a file does not keep and a fused optimizer needs."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            # A step has the shape of a parameter that is a number, but stays where the optimizer has put it.
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                entries[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
