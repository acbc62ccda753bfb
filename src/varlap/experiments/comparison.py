"""MAP, temperature scaling, Laplace, VI and VL from the same start, each as good as held-out images can make it."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from varlap.curvature import fisher_diagonal
from varlap.errors import ConfigError, NonFiniteError, without_warnings
from varlap.experiments.assessment import assess, draw_figures
from varlap.experiments.evaluation import Evaluated
from varlap.experiments.image_task import ImageTask
from varlap.experiments.training_setup import OBJECTIVES
from varlap.experiments.ways import set_best_variances
from varlap.metrics import evaluate
from varlap.posterior import BNN
from varlap.posthoc import fit_temperature, laplace
from varlap.predict.dispatch import How
from varlap.training import fit

BETAS = (0.01, 0.03, 0.1)
"""what β is chosen from, for every method that is trained"""
LAPLACE_BETAS = (0.001, 0.003, 0.01, 0.1)
"""what β of Laplace's variances is chosen from; it costs no training"""
WAYS: dict[str, tuple[How, ...]] = {"MAP": ("mean",), "VI": ("mean", "sampled"), "VL": ("mean", "sampled")}
"""the methods that are trained, and by which network each may predict"""

LINEARISED = "VL, linearised"
BOOTSTRAP = 1000
"""how often the test images are drawn anew for intervals"""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """How to compare: a task with held-out images, and one budget for all methods.

    Each method is trained once for each β of `BETAS` from the same weights and in the same order of batches. The NLL of
    the held-out images chooses β, and for VI and VL whether to predict by the mean network or by samples; then the
    test images are looked at once. Temperature scaling and Laplace, which is linearised, start from the chosen MAP.

    >>> next(Comparison(ImageTask("digits", "mlp"), epochs=1).run())
    Traceback (most recent call last):
    varlap.errors.ConfigError: a comparison needs held-out images to choose by; give ImageTask(..., validation=0.2)
    """

    task: ImageTask
    epochs: int = 40
    lr: float = 1e-2
    batch_size: int = 64
    ood: str = "letters"
    """images from elsewhere: see `varlap.experiments.outside`"""
    progress: Any = "none"
    """of each training, as in `varlap.fit`"""

    def run(self, out: Path | str | None = None, tell: Tell = lambda _: None) -> Iterator[Evaluated]:
        """Yield the methods as they are finished; with `out`, write each into a folder there, with its pictures."""
        if self.task.held_out is None:
            raise ConfigError("a comparison needs held-out images to choose by; give ImageTask(..., validation=0.2)")
        self.task.outside(self.ood)  # what is wrong is said now, not after the first training
        if out is not None:
            _make_folder(Path(out))
        return self._run(None if out is None else Path(out), tell)

    def _run(self, out: Path | None, tell: Tell) -> Iterator[Evaluated]:
        for found, bnn, fisher in self._methods(tell):
            if out is not None:
                folder = out / folder_name(found.name)
                found.write(folder)
                if found.spec["method"] != "map" and found.name != LINEARISED:  # σ never trained, or drawn already
                    num_data, beta = len(self.task.training[1]), found.spec["beta"]
                    draw_figures(bnn, folder, fisher=fisher, num_data=num_data, beta=beta)
            yield found

    def _methods(self, tell: Tell) -> Iterator[tuple[Evaluated, BNN, Any]]:
        for method in WAYS:
            bnn, beta, how, seconds = self._best(method, tell)
            spec = {"method": method.lower(), "beta": beta}
            if method != "MAP":
                # Its picture shows the optimum of VL's variances; VI's is another.
                fisher = fisher_diagonal(bnn, self.task.training, batch_size=512) if method == "VL" else None
                yield self._assessed(bnn, method, spec, seconds, how), bnn, fisher
                if method == "VL":  # the way for what lies outside the training data
                    yield self._assessed(bnn, LINEARISED, spec, seconds, "linearised"), bnn, None
                continue
            yield self._assessed(bnn, "MAP", spec, seconds), bnn, None
            start = time.monotonic()
            temperature = fit_temperature(bnn, self.task.held_out)
            took = seconds + time.monotonic() - start
            tell(f"temperature scaling: held-out images choose {temperature:.2f}")
            yield self._assessed(bnn, "MAP + temperature scaling", spec, took, temperature=temperature), bnn, None
            start = time.monotonic()
            fisher, beta = self._laplace(bnn)
            took = seconds + time.monotonic() - start
            tell(f"Laplace: held-out images choose β = {beta:g} for the variances")
            spec = {"method": "laplace", "beta": beta, "beta_of_the_mean": spec["beta"]}
            yield self._assessed(bnn, "Laplace", spec, took, how="linearised"), bnn, fisher

    def _best(self, method: str, tell: Tell) -> tuple[BNN, float, How, float]:
        """Train for each β; return the network of the best held-out NLL, its β, its way and how long it trained.

        A β that diverges is passed over, and so is a way of predicting that gives no numbers.
        """
        best: tuple[float, BNN, float, How, float] | None = None
        num_data = len(self.task.training[1])
        for beta in BETAS:
            tell(f"{method}, β = {beta:g}: {self.epochs} epoch{'s' * (self.epochs > 1)}")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.task.seed)  # all methods start from the same weights
                bnn = BNN(self.task.network())
            start = time.monotonic()
            try:
                fit(
                    bnn,
                    OBJECTIVES[method.lower()](num_data, beta=beta, seed=self.task.seed),
                    self.task.training,
                    epochs=self.epochs,
                    lr=self.lr,
                    batch_size=self.batch_size,
                    seed=self.task.seed,
                    progress=self.progress,
                )
            except NonFiniteError as error:
                tell(f"{method}, β = {beta:g} diverged: {error}")
                continue
            seconds = time.monotonic() - start
            for how in WAYS[method]:
                nll = self._held_out_nll(bnn, how)
                if nll < (math.inf if best is None else best[0]):
                    best = nll, bnn, beta, how, seconds
        if best is None:
            raise NonFiniteError(f"{method} diverged for every β of {BETAS}; try a smaller learning rate")
        tell(f"{method}: held-out images choose β = {best[2]:g}, {best[3]} (NLL {best[0]:.3f})")
        return best[1:]

    def _laplace(self, bnn: BNN) -> tuple[Any, float]:
        """Set Laplace's variances for the β of the best held-out NLL."""
        fisher, num_data = laplace(bnn, self.task.training, batch_size=512), len(self.task.training[1])
        nll_fn = functools.partial(self._held_out_nll, bnn, "linearised")
        return fisher, set_best_variances(bnn, fisher, num_data, LAPLACE_BETAS, nll_fn)[0]

    def _held_out_nll(self, bnn: BNN, how: How) -> float:
        try:
            with without_warnings():  # samples may collapse; then they are not chosen
                nll = evaluate(bnn, self.task.held_out, how=how, only=["nll"])["nll"]
        except NonFiniteError:
            return math.inf
        return nll if math.isfinite(nll) else math.inf  # which, unlike NaN, is never the least

    def _assessed(
        self, bnn: BNN, name: str, spec: dict[str, Any], seconds: float, how: How = "mean", temperature: float = 1.0
    ) -> Evaluated:
        described = self.task.describe()
        described.pop("normaliser")
        spec = described | spec | {"epochs": self.epochs, "lr": self.lr, "batch_size": self.batch_size, "ood": self.ood}
        return assess(
            bnn,
            self.task.test,
            name=name,
            spec=spec,
            how=how,
            temperature=temperature,
            ood=self.task.outside(self.ood),
            images=self.task.images.test_images,
            bootstrap=BOOTSTRAP,
            seconds=seconds,
        )


def folder_name(name: str) -> str:
    """Return a method's name as that of a folder.

    >>> folder_name("MAP + temperature scaling"), folder_name("VL(H)")
    ('map-temperature-scaling', 'vl-h')
    """
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower()).split()
    return "-".join(words)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be made: {error}; choose another out") from error
