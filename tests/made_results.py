"""Results as `varlap reproduce` would leave them, made up without training."""

from typing import Any

from varlap.experiments import Result, RunSpec
from varlap.experiments.final_line import FinalLine, FinalRow
from varlap.experiments.ways import NAMES

ORIGIN = {"varlap": "1", "torch": "2", "python": "3", "hardware": "a GPU", "date": "2026-01-01", "device": "cuda:0"}
BEST = {"map": 0.01, "vi": 0.1, "vl": 0.1}
SECONDS = {"map": 2.0, "vi": 2.5, "vl": 6.0}


def made_result(method: str, beta: float, *, data: str = "cifar10", num_epochs: int = 4, **spec: Any) -> Result:
    """Return a result whose NLL is least at the method's best β, a little further to the left on test images."""
    chosen = RunSpec(data=data, method=method, beta=beta, **({"epochs": num_epochs} | spec))  # type: ignore[arg-type]
    away = abs(beta / BEST[method] - 1)
    on_test = abs(beta / BEST[method] - 0.35)
    test, validation = {}, {}
    for key_method, way in NAMES:
        if key_method != method:
            continue
        nll = {"mean": 0.30, "sampled": 0.32, "scaled": 0.28, "linearised": 0.27}[way] + 0.01 * chosen.seed
        nll += {"map": 0.05, "vi": 0.02, "vl": 0.0}[method] + 0.002 * chosen.log_sigma_lr_multiplier
        scores = {"accuracy": 0.93 - 0.01 * on_test, "ece": 0.02 + 0.01 * on_test, "brier": 0.1}
        outside = {"ood_auroc_entropy": 0.9, **({"ood_auroc_mutual_information": 0.95} if way != "mean" else {})}
        fitted = {"scaled": {"temperature": 1.2}, "linearised": {"laplace_beta": 0.003}}.get(way, {})
        test[way] = {"nll": nll + 0.05 * on_test, **scores, **outside, **fitted}
        validation[way] = {"nll": nll + 0.05 * away, **scores, **fitted} if chosen.validation else {}
    history = tuple(
        {
            "epoch": epoch,
            "elbo": -1.5 / (1 + epoch * chosen.log_sigma_lr_multiplier / 10) - beta,
            "log_likelihood": -1.0 / (1 + epoch),
            **({"validation_nll": 0.2 + 1.0 / (1 + epoch)} if chosen.validation else {}),
            "seconds": seconds,
        }
        for epoch, seconds in enumerate([60.0] + [SECONDS[method]] * (num_epochs - 1))
    )
    kept = {way: scores for way, scores in validation.items() if scores}
    return Result(chosen, test, kept, ORIGIN, sum(row["seconds"] for row in history), history, "svhn")


def made_sweep(betas: tuple[float, ...] = (0.01, 0.03, 0.1), **spec: Any) -> list[Result]:
    """Return a sweep over β of all three methods."""
    return [made_result(method, beta, **spec) for method in BEST for beta in betas]


def made_line(rows: dict[tuple, float], sweep_epochs: int = 50) -> FinalLine:
    """Return what was chosen for final runs of VL, by a sweep that has not scored linearised predictions."""
    chosen = tuple(FinalRow(*key, beta, own=key[1] != "linearised") for key, beta in rows.items())
    spec = RunSpec("cifar10", "vl", 1.0, epochs=4)
    return FinalLine(spec, {"vl": (0, 1)}, {"vl": sweep_epochs}, {"vl": (0.01, 0.1)}, {"vl": (0,)}, rows=chosen)
