"""`varlap demo`: the main job on data that needs no download."""

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from varlap.cli.mistakes import user_mistakes
from varlap.data import load
from varlap.metrics import evaluate
from varlap.models import mlp
from varlap.objectives import MAP, VL, Objective
from varlap.posterior import BNN
from varlap.training import adam

BATCH_SIZE = 64
EXPLAINED = {"accuracy": "accuracy ↑", "nll": "test NLL ↓", "ece": "ECE ↓"}


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = 60,
    beta: Annotated[float, typer.Option(help="tempering of the prior, for both methods")] = 0.01,
    seed: Annotated[int, typer.Option(help="of weights, batches and drawn labels")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Train MAP and VL on scikit-learn's digits and compare them on held-out images.

    Example: varlap demo --beta 0.01
    """
    with user_mistakes():
        digits = load("digits")
        train = digits.train_images.flatten(1), digits.train_labels
        test = digits.test_images.flatten(1), digits.test_labels
        num_data = len(train[1])
        console = Console(stderr=as_json)
        console.print(f"digits: {num_data} training images, {len(test[1])} test images, {epochs} epochs a method")
        scores = {}
        for name, objective in {"MAP": MAP(num_data, beta=beta), "VL": VL(num_data, beta=beta, seed=seed)}.items():
            torch.manual_seed(seed)  # both methods start from the same weights
            bnn = BNN(mlp(train[0].shape[1], digits.num_classes, hidden=(100, 100)))
            _train(bnn, objective, train, epochs, seed, name, console)
            scores[name] = evaluate(bnn, test, only=EXPLAINED)
        if as_json:
            typer.echo(json.dumps({"data": "digits", "beta": beta, "epochs": epochs, "seed": seed, "scores": scores}))
        else:
            console.print(_table(scores))


def _train(
    bnn: BNN,
    objective: Objective,
    train: tuple[torch.Tensor, torch.Tensor],
    epochs: int,
    seed: int,
    name: str,
    console: Console,
) -> None:
    optimizer = adam(bnn, lr=2e-3)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in track(range(epochs), description=f"{name:>3}", console=console):
        for items in torch.randperm(len(train[1]), generator=shuffle).split(BATCH_SIZE):
            terms = objective(bnn, train[0][items], train[1][items])
            terms.loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _table(scores: dict[str, dict[str, float]]) -> Table:
    table = Table("method", *EXPLAINED.values(), title="held-out digits, prediction by the mean network")
    for name, values in scores.items():
        cells = []
        for key in EXPLAINED:
            column = [other[key] for other in scores.values()]
            best = values[key] == (max(column) if key == "accuracy" else min(column))
            cells.append(f"[bold green]{values[key]:.4f}[/]" if best else f"{values[key]:.4f}")
        table.add_row(name, *cells)
    return table
