"""A small experiment on disk, as `fit` and `Evaluated.write` leave it, made without training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from varlap import report
from varlap.experiments import Evaluated
from varlap.metrics import score

LABELS = torch.arange(40) % 4


def evaluated(name: str, seed: int = 0, sharpness: float = 1.0, **spec: object) -> Evaluated:
    """Return an evaluation with all that a report can draw."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(LABELS), 4, generator=generator) + 2 * torch.nn.functional.one_hot(LABELS, 4)
    probs = (sharpness * logits).softmax(1)
    outside = (0.3 * torch.randn(30, 4, generator=generator)).softmax(1)
    entropy, ood_entropy = (-(p * p.log()).sum(1) for p in (probs, outside))
    order = entropy.argsort(descending=True)[:6]
    kept = {
        "probs": probs,
        "labels": LABELS,
        "entropy": entropy,
        "ood_entropy": ood_entropy,
        "mutual_information": 0.1 * entropy,
        "ood_mutual_information": 0.2 * ood_entropy,
        "least_sure": order,
        "images": torch.rand(6, 1, 8, 8, generator=generator),
    }
    found = Evaluated(name, {}, {}, kept)
    scores = score(found.prediction(), LABELS, bootstrap=20)
    origin = {"varlap": "1", "torch": "2", "hardware": "a CPU", "date": "2026-01-01"}
    return Evaluated(name, scores, {"data": "toys", "model": "mlp", "seed": seed} | spec, kept, origin, 10.0 + seed)


def write_run(folder: Path, one: Evaluated) -> Path:
    """Write the folder of a run with one evaluation in it."""
    one.write(folder / "evaluations" / "mean")
    rows = [
        {"epoch": e, "step": e, "elbo": -2.0 / (e + 1), "log_likelihood": -1.5 / (e + 1), "curvature": 0.1, "kl": 0.5}
        for e in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "spec.json").write_text(json.dumps({"label": {"method": one.name}, "network": "Sequential(\n  a\n)"}))
    (folder / "figures").mkdir()
    (folder / "figures" / "sigma_over_s.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><script>alert(2)</script></svg>'
    )
    return folder


def write_runs(folder: Path) -> Path:
    """Write two methods, one of them with three seeds."""
    for seed in range(3):
        write_run(folder / f"vl-{seed}", evaluated("VL", seed))
    write_run(folder / "map-0", evaluated("MAP", 0, sharpness=3.0))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder of runs that a test may change."""
    return write_runs(tmp_path / "runs")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page about such a folder, drawn once; the runs lie beside its folder."""
    folder = tmp_path_factory.mktemp("written")
    long = "A title with a_very_long_word_" + 10 * "without_a_gap_"
    return report.write(write_runs(folder / "runs"), folder / "out", title=long)


@pytest.fixture
def made() -> Callable[..., Evaluated]:
    """Return what makes an evaluation."""
    return evaluated
