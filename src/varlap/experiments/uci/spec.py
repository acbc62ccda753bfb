"""What the UCI experiment runs: a recipe for each table, and the runs that it asks for."""

import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

from varlap.data import UCI_SETS
from varlap.errors import ConfigError, did_you_mean

Trained = Literal["map", "vi", "vl"]
Activation = Literal["tanh", "softplus"]
TRAINED: tuple[Trained, ...] = get_args(Trained)


@dataclass(frozen=True)
class TableRun:
    """One network trained on one split of one table.

    >>> TableRun("boston", "vl", split=0, beta=0.1, epochs=10, batch_size=64).hidden
    50
    """

    data: str
    """the short name of a UCI table"""
    method: Trained
    split: int
    """number of the standard split, counted from 0"""
    beta: float
    """tempering of the KL; for MAP of the prior's quadratic part"""
    epochs: int
    batch_size: int
    tuning: bool = False
    """True trains on a part of the split's training rows and scores the rest of them; False scores the test rows"""
    hidden: int = 50
    """units of the one hidden layer"""
    activation: Activation = "tanh"
    """VL needs a second derivative, which ReLU, the usual choice here, does not have"""
    lr: float = 0.02
    """of Adam, with a cosine to zero"""
    validation: float = 0.2
    """part of the training rows that is held out where β is chosen"""
    laplace_betas: tuple[float, ...] = ()
    """β that Laplace's variances are set for after MAP; each is a way of predicting"""
    seed: int = 0
    """of weights, batches, drawn labels and held-out rows, together with the split"""

    def __post_init__(self) -> None:
        for name, allowed in (("data", UCI_SETS), ("method", TRAINED), ("activation", get_args(Activation))):
            _check_choice("a run", name, getattr(self, name), allowed)
        _check_numbers("a run", self, ("beta", "lr"), ("epochs", "batch_size", "hidden"))
        if type(self.split) is not int or self.split < 0:
            raise ConfigError(f"a run has split = {self.split!r}; it must be a whole number, counted from 0")
        object.__setattr__(self, "laplace_betas", tuple(self.laplace_betas))  # JSON gives a list

    @property
    def num_steps(self) -> float:
        """About how many steps the training takes, by which time is estimated."""
        return self.epochs * NUM_TRAINING_ROWS[self.data] / self.batch_size * (1 - self.validation * self.tuning)


@dataclass(frozen=True)
class TableRecipe:
    """How a table is run: settings of all its runs, and what β is chosen from.

    >>> recipe = TableRecipe.named("boston")
    >>> len(recipe.tuning_runs()) == 3 * 9 * 2  # methods, β and splits
    True
    """

    data: str
    epochs: int
    batch_size: int
    betas: tuple[float, ...]
    """what β of every method is chosen from, Laplace's as well: as many trials for each"""
    hidden: int = 50
    activation: Activation = "tanh"
    lr: float = 0.02
    validation: float = 0.2
    tuning_splits: int = 2
    """the first so many splits' training rows choose β"""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("data", UCI_SETS), ("activation", get_args(Activation))):
            _check_choice("a recipe", name, getattr(self, name), allowed)
        _check_numbers("a recipe", self, ("lr",), ("epochs", "batch_size", "hidden", "tuning_splits"))
        if not 0 < self.validation < 1:
            raise ConfigError(
                f"a recipe has validation = {self.validation}; it must be a part of the rows, such as 0.2"
            )
        object.__setattr__(self, "betas", tuple(self.betas))
        if not self.betas or not all(beta > 0 for beta in self.betas):
            raise ConfigError(f"a recipe has betas = {self.betas}; give at least one, all of them positive")

    @classmethod
    def named(cls, data: str, **changes: Any) -> "TableRecipe":
        """Read the shipped recipe of a table; `changes` replace its settings.

        >>> TableRecipe.named("yacht", epoch=3)
        Traceback (most recent call last):
        varlap.errors.ConfigError: a recipe has no setting 'epoch'; did you mean 'epochs'?
        """
        content = _shipped()
        _check_choice("a recipe", "data", data, UCI_SETS)
        known = [field.name for field in dataclasses.fields(cls)]
        settings = {**content["common"], **content["sets"][data], **changes, "data": data}
        for name in settings:
            _check_choice("a recipe", "setting", name, known)
        return cls(**settings)

    def tuning_runs(self) -> list[TableRun]:
        """Return the runs whose held-out rows choose β."""
        return [
            self._run(method, split, beta, tuning=True)
            for split in range(self.tuning_splits)
            for method in TRAINED
            for beta in self.betas
        ]

    def final_runs(self, betas: Mapping[str, float], splits: range) -> list[TableRun]:
        """Return the runs at the chosen β, whose test rows are reported."""
        return [self._run(method, split, betas[method], tuning=False) for split in splits for method in TRAINED]

    def _run(self, method: Trained, split: int, beta: float, tuning: bool) -> TableRun:
        own = {name: getattr(self, name) for name in SHARED}
        laplace_betas = self.betas if method == "map" else ()
        return TableRun(method=method, split=split, beta=beta, tuning=tuning, laplace_betas=laplace_betas, **own)


SHARED = {field.name for field in dataclasses.fields(TableRecipe)} & {
    field.name for field in dataclasses.fields(TableRun)
}
"""settings that a recipe and its runs have in common"""


NUM_TRAINING_ROWS: Mapping[str, int] = {
    "boston": 455,
    "concrete": 927,
    "energy": 691,
    "kin8nm": 7373,
    "naval": 10741,
    "power": 8611,
    "protein": 41157,
    "wine": 1439,
    "yacht": 277,
}
"""in each split, for estimates of time"""

NUM_SPLITS: Mapping[str, int] = {name: 5 if name == "protein" else 20 for name in UCI_SETS}
"""how many standard splits a table has"""


def published() -> dict[str, Any]:
    """Return published figures: `methods` with their sources, `log_likelihood` and `rmse` by method and table.

    >>> published()["rmse"]["PBP"]["boston"]
    [3.01, 0.18]
    """
    return tomllib.loads((files("varlap.experiments.uci") / "published.toml").read_text())


@functools.cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads((files("varlap.experiments.uci") / "uci.toml").read_text())


def _check_choice(where: str, name: str, value: Any, allowed: Any) -> None:
    if value in allowed:
        return
    what = f"no setting {value!r}" if name == "setting" else f"{name} = {value!r}"
    raise ConfigError(f"{where} has {what}; {did_you_mean(value, allowed)}")


def _check_numbers(where: str, spec: Any, positive: tuple[str, ...], counts: tuple[str, ...]) -> None:
    for name in positive:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{where} has {name} = {value!r}; it must be a positive, finite number")
        object.__setattr__(spec, name, float(value))  # 1 and 1.0 are the same run
    for name in counts:
        if type(value := getattr(spec, name)) is not int or value < 1:
            raise ConfigError(f"{where} has {name} = {value!r}; it must be a whole number of at least 1")
