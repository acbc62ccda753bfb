"""Evaluate a network once, and keep all that tables and pictures are made of."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import MissingExtraError
from varlap.experiments.evaluation import Evaluated, origin
from varlap.likelihoods import Prediction
from varlap.metrics import Scores
from varlap.metrics.accumulator import uncertainties
from varlap.metrics.bootstrap import checked_bootstrap
from varlap.metrics.evaluate import items_at_once, outside_predictions, predictions, predictor
from varlap.metrics.rows import IGNORED_LABEL
from varlap.plot import sigma_over_s, travelling_variances
from varlap.posterior import BNN
from varlap.predict.dispatch import How

log = logging.getLogger(__name__)

NUM_LEAST_SURE = 12


@torch.no_grad()
def assess(
    bnn: BNN,
    test: Any,
    *,
    name: str,
    spec: Mapping[str, Any] | None = None,
    how: How = "mean",
    num_samples: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    ood: Any = None,
    images: Tensor | None = None,
    bootstrap: int = 0,
    batch_size: int | None = None,
    seconds: float | None = None,
) -> Evaluated:
    """Predict each batch once; return the scores that `varlap.evaluate` gives, and the predictions themselves.

    Args:
        bnn: the network.
        test: a tuple (x, y), a Dataset, a DataLoader or a list of batches.
        name: what a table will call it.
        spec: what else decides the result: data, method, beta, epochs, ...; the way of predicting is added.
        how, num_samples, seed, temperature, ood, bootstrap, batch_size: as in `varlap.evaluate`.
        images: the test items as people see them, before any normalising, of which the least sure are kept.
        seconds: the time that training took.

    >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])
    >>> found = assess(BNN(torch.nn.Linear(2, 3)), (x, y), name="untrained", how="linearised")
    >>> sorted(found.predictions)
    ['entropy', 'labels', 'least_sure', 'mutual_information', 'probs']
    >>> found.spec
    {'how': 'linearised', 'num_samples': 30, 'temperature': 1.0}
    """
    checked_bootstrap("assess", bootstrap)
    predict_fn = predictor(bnn, how, num_samples, seed, temperature)
    scores = Scores(bootstrap=bootstrap, seed=seed, trusted=True)
    batch_size = items_at_once(bnn, how, batch_size)
    inside: list[dict[str, Tensor]] = []
    outside: list[dict[str, Tensor]] = []
    num_draws = None
    for y, prediction in predictions(bnn, test, batch_size, predict_fn):
        scores.add(prediction, y)
        inside.append(_kept(prediction, y))
        num_draws = None if how == "mean" else len(prediction.outputs)
    if ood is not None:
        for prediction in outside_predictions(bnn, ood, batch_size, predict_fn):
            scores.add_ood(prediction)
            outside.append({f"ood_{name}": value.cpu() for name, value in uncertainties(prediction).items()})
    kept, kept_outside = (tree.concatenate(parts) if parts else {} for parts in (inside, outside))
    unsure = kept["entropy"] if "entropy" in kept else kept.get("variance")
    if unsure is not None:
        unsure = unsure.flatten(1).mean(1) if unsure.ndim > 1 else unsure
        kept["least_sure"] = unsure.topk(min(NUM_LEAST_SURE, len(unsure))).indices
        if images is not None:
            kept["images"] = images[kept["least_sure"].to(images.device)].cpu()
    decided = dict(spec or {}) | {"how": how, "num_samples": num_draws, "temperature": temperature}
    return Evaluated(name, scores.compute(), decided, kept | kept_outside, origin(bnn.device), seconds)


def draw_figures(
    bnn: BNN,
    folder: Path | str,
    *,
    fisher: Mapping[str, Tensor] | None = None,
    num_data: int | None = None,
    beta: float | None = None,
) -> list[Path]:
    """Draw into `folder/figures` what needs the network itself: σ/s by layer, and σ against its optimum.

    Without matplotlib nothing is drawn, and the log says so.

    Args:
        bnn: the network with its posterior.
        folder: that of the run.
        fisher: the curvature per datum, from `varlap.fisher_diagonal` or `varlap.laplace`; without it, or without
            `num_data` and `beta`, there is no second picture.
        num_data: N, the number of training items.
        beta: the objective's β.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in draw_figures(BNN(torch.nn.Linear(2, 3)), folder)]
    ['sigma_over_s.svg']
    """
    figures = Path(folder) / "figures"
    try:
        drawn = {"sigma_over_s": sigma_over_s(bnn)}
        if fisher is not None and num_data is not None and beta:
            drawn["travelling_variances"] = travelling_variances(bnn, fisher, num_data, beta)
    except MissingExtraError as error:
        log.warning("no figures were drawn: %s", error)
        return []
    figures.mkdir(parents=True, exist_ok=True)
    paths = {name: figures / f"{name}.svg" for name in drawn}
    for name, ax in drawn.items():
        figure: Any = ax.figure
        figure.savefig(paths[name], metadata={"Date": None})
    return list(paths.values())


def _kept(prediction: Prediction, targets: Any) -> dict[str, Tensor]:
    """Return what is kept of a batch, on the CPU: its outputs, a copy for each draw, are let go."""
    if prediction.probs is not None:
        ignored = getattr(prediction.likelihood, "ignored_label", None)
        labels = targets if ignored is None else torch.where(targets == ignored, IGNORED_LABEL, targets)
        kept = {"probs": prediction.probs, "labels": labels} | uncertainties(prediction)
    else:
        kept = uncertainties(prediction) | {
            "mean": prediction.mean,
            "variance": prediction.variance,
            "targets": targets,
        }
    return {name: value.cpu() for name, value in kept.items() if isinstance(value, Tensor)}
