"""Experiments as data files: each is a grid of settings, and becomes a list of specs."""

import dataclasses
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from varlap.errors import ConfigError, did_you_mean
from varlap.experiments.spec import Method, RunSpec

PAPER = "paper"  # the file of the paper's own numbers, which is no experiment

# Under the same budget, for the best NLL: a larger step, a cosine, and the library's curvature; then SGD for Adam, with
# VL's variances in closed form. Each says all that it is about, so that it replaces what a file says.
_BY_ADAM: dict[str, Any] = {"optimizer": "Adam", "lr": 1e-3, "momentum": 0.0, "warmup": 0.0, "clip_norm": None}
_BY_SGD: dict[str, Any] = {"optimizer": "SGD", "lr": 0.2, "momentum": 0.9, "warmup": 0.05, "clip_norm": 1.0}
_BY_ADAM |= {"batch_size": 128, "gradient": "held", "variances": "learnt"}
_BY_SGD |= {"batch_size": 256, "gradient": "quiet", "variances": "closed-form"}
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "ours": {"recipe": "ours", "schedule": "cosine", "curvature": "default", **_BY_ADAM},
    "sgd": {"recipe": "sgd", "schedule": "cosine", "curvature": "default", **_BY_SGD},
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
    def named(cls, name: str, /, *, recipe: str = "paper", **changes: Any) -> "Experiment":
        """Read a shipped experiment; `changes` replace its settings, and a list of values its grid's.

        >>> {spec.data for spec in Experiment.named("table-1", data=["cifar10"], epochs=50).specs}
        {'cifar10'}
        """
        if name not in cls.names():
            raise ConfigError(f"there is no experiment {name!r}; {did_you_mean(name, cls.names())}")
        return cls._of(name, (_folder() / f"{name}.toml").read_text(), recipe, changes)

    @classmethod
    def read(cls, path: Path | str, /, *, recipe: str = "paper", **changes: Any) -> "Experiment":
        """Read an experiment of your own, in the form of the shipped files.

        >>> Experiment.read("my.toml")
        Traceback (most recent call last):
        varlap.errors.ConfigError: the experiment my.toml cannot be read: [Errno 2] No such file or directory: 'my.toml'
        """
        try:
            return cls._of(Path(path).stem, Path(path).read_text(), recipe, changes)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise ConfigError(f"{path}: {error}") from error
            raise ConfigError(f"the experiment {path} cannot be read: {error}") from error

    @classmethod
    def _of(cls, name: str, text: str, recipe: str, changes: Mapping[str, Any]) -> "Experiment":
        if recipe not in RECIPES:
            raise ConfigError(f"recipe {recipe!r}: {did_you_mean(recipe, RECIPES)}")
        content = tomllib.loads(text)
        if not isinstance(content.get("title", ""), str):
            raise ConfigError(f"title = {content['title']!r} must be a text")
        return cls(name, content.get("title", name), expand(content, {**RECIPES[recipe], **changes}))


def expand(content: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[RunSpec, ...]:
    """Return a spec for each point of a grid; one that comes twice is run once.

    β may be a list for all methods, or a table with a list for each.

    >>> len(expand({"grid": {"data": ["digits"], "method": ["map", "vl"], "beta": [0.1, 1.0]}}, {"seed": [0, 1]}))
    8
    >>> grid = {"data": "digits", "method": ["map", "vl"], "beta": {"map": [0.3], "vl": [0.03]}}
    >>> [(spec.method, spec.beta) for spec in expand({"grid": grid}, {})]
    [('map', 0.3), ('vl', 0.03)]
    """
    unknown = set(content) - {"title", "common", "grid"}
    if unknown:
        part = sorted(unknown)[0]
        raise ConfigError(f"an experiment has no part {part!r}; {did_you_mean(part, ('title', 'common', 'grid'))}")
    for part in ("common", "grid"):
        if not isinstance(content.get(part, {}), Mapping):
            raise ConfigError(
                f"{part} = {content[part]!r} must be a table of settings: [{part}], then NAME = VALUE lines"
            )
    settings = {**content.get("common", {}), **content.get("grid", {}), **changes}
    axes = {name: _listed(name, value) for name, value in settings.items()}
    if "recipe" not in changes:
        _refuse_borrowed_names(axes.get("recipe", []))
    points = (dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values()))
    specs = tuple(dict.fromkeys(RunSpec.of(point) for whole in points for point in _with_own_betas(whole)))
    _refuse_idle_multipliers(specs)
    return specs


def _refuse_borrowed_names(recipes: Sequence[Any]) -> None:
    """Refuse a file that calls itself by a recipe's name, which brings none of that recipe's settings."""
    for recipe in recipes:
        if RECIPES.get(str(recipe)):  # the paper's has none, since they are the defaults
            raise ConfigError(
                f"recipe = {recipe!r} would be a name without its settings; choose it by --recipe {recipe}, or give "
                "your own another name"
            )


def _refuse_idle_multipliers(specs: Sequence[RunSpec]) -> None:
    """Refuse to compare learning rates of log σ where VL learns none: its runs would all be the same."""
    idle = [spec for spec in specs if (spec.method, spec.variances) == ("vl", "closed-form")]
    if len({spec.log_sigma_lr_multiplier for spec in idle}) > 1:
        raise ConfigError(
            "several values of log_sigma_lr_multiplier would change nothing: VL learns no log σ where variances = "
            "'closed-form'; set variances = 'learnt' too"
        )


def _listed(name: str, value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError(f"{name} = [] leaves nothing to run; give one value at least")
    return values


def _with_own_betas(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the point with each β of its method, where the grid has a table of them."""
    betas, method = point.get("beta"), point.get("method")
    if not isinstance(betas, Mapping):
        return [point]
    methods = get_args(Method)
    for name in betas:
        if name not in methods:
            raise ConfigError(f"beta has values for {name!r}, which is no method; {did_you_mean(name, methods)}")
    if method not in methods:
        raise ConfigError(f"method = {method!r}: {did_you_mean(method, methods)}")
    if method not in betas:
        raise ConfigError(f"beta has no values for the method {method!r}; add {method} = [...] to [grid.beta]")
    return [point | {"beta": beta} for beta in _listed(f"beta.{method}", betas[method])]


def recipe_settings(recipe: str) -> dict[str, Any]:
    """Return how a recipe trains, whatever for and how long; nothing for one that an experiment has made up.

    >>> recipe_settings("ours")["lr"], recipe_settings("miniature")
    (0.001, {})
    """
    if recipe not in RECIPES:
        return {}
    usual = dataclasses.asdict(RunSpec("digits", "vl", 1.0, **RECIPES[recipe]))
    said_elsewhere = ("data", "method", "beta", "seed", "recipe", "epochs", "linearised")
    return {name: value for name, value in usual.items() if name not in said_elsewhere}


def paper_numbers(what: str) -> dict[str, Any]:
    """Return the paper's own numbers of a table, by data set and method.

    >>> paper_numbers("table-1")["cifar10"]["VL"]
    [0.23, 0.924, 0.017]
    """
    return tomllib.loads((_folder() / f"{PAPER}.toml").read_text())[what]


def _folder() -> Any:
    return files("varlap.experiments") / "files"
