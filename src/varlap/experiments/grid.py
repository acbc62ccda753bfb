"""Experiments as data files: each is a grid of settings, and becomes a list of specs."""

import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from varlap.errors import ConfigError, did_you_mean
from varlap.experiments.spec import RunSpec

PAPER = "paper"  # the file of the paper's own numbers, which is no experiment

# Under the same budget, tuned for the best NLL: a larger step, a cosine, and the library's curvature.
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "ours": {"recipe": "ours", "lr": 1e-3, "schedule": "cosine", "curvature": "default"},
}


@dataclass(frozen=True)
class Experiment:
    """A named list of runs.

    >>> len(Experiment.named("figure-2").specs)
    16
    """

    name: str
    title: str
    specs: tuple[RunSpec, ...]

    @staticmethod
    def names() -> list[str]:
        """List the shipped experiments.

        >>> Experiment.names()
        ['figure-1', 'figure-2', 'miniature', 'table-1', 'table-2']
        """
        return sorted(
            path.name[:-5] for path in _folder().iterdir() if path.name.endswith(".toml") and PAPER not in path.name
        )

    @classmethod
    def named(cls, name: str, *, recipe: str = "paper", **changes: Any) -> "Experiment":
        """Read a shipped experiment; `changes` replace its settings, and a list of values its grid's.

        >>> {spec.data for spec in Experiment.named("table-1", data=["cifar10"], epochs=50).specs}
        {'cifar10'}
        """
        if name not in cls.names():
            raise ConfigError(f"there is no experiment {name!r}; {did_you_mean(name, cls.names())}")
        if recipe not in RECIPES:
            raise ConfigError(f"recipe {recipe!r}: choose {' or '.join(map(repr, RECIPES))}")
        content = tomllib.loads((_folder() / f"{name}.toml").read_text())
        return cls(name, content["title"], expand(content, RECIPES[recipe] | changes))


def expand(content: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[RunSpec, ...]:
    """Return a spec for each point of a grid.

    >>> len(expand({"grid": {"data": ["digits"], "method": ["map", "vl"], "beta": [0.1, 1.0]}}, {"seed": [0, 1]}))
    8
    """
    unknown = set(content) - {"title", "common", "grid"}
    if unknown:
        raise ConfigError(f"an experiment has no part {sorted(unknown)[0]!r}; it has title, common and grid")
    settings = {**content.get("common", {}), **content["grid"], **changes}
    axes = {name: value if isinstance(value, list) else [value] for name, value in settings.items()}
    return tuple(RunSpec.of(dict(zip(axes, point, strict=True))) for point in itertools.product(*axes.values()))


def paper_numbers(what: str) -> dict[str, Any]:
    """Return the paper's own numbers of a table, by data set and method.

    >>> paper_numbers("table-1")["cifar10"]["VL"]
    [0.23, 0.924, 0.017]
    """
    return tomllib.loads((_folder() / f"{PAPER}.toml").read_text())[what]


def _folder() -> Any:
    return files("varlap.experiments") / "files"
