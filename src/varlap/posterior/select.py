"""Which of a network's parameters are Bayesian."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from varlap.errors import ConfigError, NetworkError, did_you_mean
from varlap.posterior.prior import Weight, weights_of

Select = str | Iterable[str] | Callable[[str, Tensor], bool]


def select_weights(network: nn.Module, select: Select | None, likelihood: Any = None) -> list[Weight]:
    """Return the weights chosen by name patterns or a function; by default all that require a gradient.

    A parameter that the likelihood holds too is none: no draw of the network's weights would reach it there.

    >>> network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> [weight.name for weight in select_weights(network, "1.*")]
    ['1.weight', '1.bias']
    """
    if isinstance(select, nn.Module):
        names = [f"{name}.*".removeprefix(".") for name, module in network.named_modules() if module is select]
        raise ConfigError(
            f"select is a {type(select).__name__}; say which parameters are Bayesian by their names, as "
            f"select={names[0] if names else 'head.*'!r}"
        )
    weights = [weight for weight in weights_of(network) if weight.value.numel()]  # of no weights there is no posterior
    if select is None:
        chosen = [weight for weight in weights if weight.value.requires_grad]
    elif callable(select):
        chosen = [weight for weight in weights if select(weight.name, weight.value)]
    else:
        chosen = _matching(weights, [select] if isinstance(select, str) else list(select))
    if not chosen:
        raise ConfigError(
            "no Bayesian parameter is left: "
            + ("no parameter of the network requires a gradient" if select is None else "select chose none")
            + "; call requires_grad_(True) on some, or pass select='head.*' with names of network.named_parameters()"
        )
    of_likelihood = {id(p) for p in likelihood.parameters()} if isinstance(likelihood, nn.Module) else set()
    for weight in chosen:
        if id(weight.value) in of_likelihood:
            raise ConfigError(
                f"parameter {weight.name!r} is the likelihood's too, whose parameters are point estimates; leave it "
                f"out with select=lambda name, parameter: name != {weight.name!r}"
            )
        if isinstance(weight.module, nn.Embedding | nn.EmbeddingBag) and weight.module.sparse:
            raise NetworkError(
                f"parameter {weight.name!r} has sparse gradients, but the prior's reaches every row; leave out "
                f"sparse=True in its {type(weight.module).__name__}"
            )
        if not weight.value.is_floating_point():
            raise NetworkError(
                f"parameter {weight.name!r} has dtype {weight.value.dtype}, but a Gaussian posterior needs real "
                f"floating point numbers; leave it out with select=lambda name, parameter: name != {weight.name!r}"
            )
    return chosen


def padding_rows(network: nn.Module, weights: Iterable[Weight]) -> dict[str, int]:
    """Return by name the row that `nn.Embedding(padding_idx=...)` keeps as it is, of weights that have such a row.

    A tensor that other modules use too learns through them.

    >>> network = nn.Sequential(nn.Embedding(5, 2, padding_idx=0), nn.Linear(2, 3))
    >>> padding_rows(network, weights_of(network))
    {'0.weight': 0}
    """
    rows: dict[int, set[int | None]] = {}
    for module in network.modules():
        row = module.padding_idx if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        for parameter in module._parameters.values():
            rows.setdefault(id(parameter), set()).add(row)
    found = {weight.name: rows[id(weight.value)] for weight in weights}
    return {name: row for name, (row, *others) in found.items() if row is not None and not others}


def _matching(weights: list[Weight], patterns: list[str]) -> list[Weight]:
    names = [weight.name for weight in weights]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            inside = any(name.startswith(f"{pattern}.") for name in names)
            known = [f"{pattern}.*"] if inside else names
            hint = did_you_mean(pattern, known, f"names look like {names[0]!r}" if names else "")
            raise ConfigError(f"select pattern {pattern!r} matches no parameter of the network; {hint}")
    return [weight for weight in weights if any(fnmatchcase(weight.name, pattern) for pattern in patterns)]
