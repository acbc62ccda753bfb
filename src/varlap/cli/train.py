"""`varlap train`: train a network on a data set, and carry the run on by the same command."""

import contextlib
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from varlap.cli.device import choose_device, warn_if_slow
from varlap.cli.mistakes import log_to_stderr, user_mistakes
from varlap.cli.reproduce import Recipe
from varlap.cli.training import Method, by_options, by_recipe
from varlap.errors import ConfigError
from varlap.experiments import origin
from varlap.experiments.augmentation import augmentation
from varlap.experiments.spec import USUAL_WIDTH, Model
from varlap.files import finite, replace_file
from varlap.metrics import evaluate
from varlap.posthoc import laplace
from varlap.streams import current_rank
from varlap.training import fit

RESULT = "result.json"


def train(
    data: Annotated[str, typer.Argument(help="digits, fashion_mnist, mnist, cifar10, cifar100, svhn")],
    method: Annotated[Method, typer.Option(help="how to train")] = "vl",
    beta: Annotated[float, typer.Option(help="tempering of the KL: 1 is Bayes")] = 0.01,
    recipe: Annotated[
        Recipe | None,
        typer.Option(help="train as varlap reproduce does: by the paper's settings, ours by Adam, or ours by SGD"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="with --recipe, any other setting of a run: NAME=VALUE; may be repeated"),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="passes over the training images; 40, with --recipe 200")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="of the means; 1e-3 for PreactResNet-18, else 3e-3, or the recipe's")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="images a step; 128, or the recipe's")] = None,
    seed: Annotated[int, typer.Option(help="of weights, batches and drawn labels")] = 0,
    model: Annotated[
        Literal["auto", Model], typer.Option(help="auto: a small convnet for digits, else PreactResNet-18")
    ] = "auto",
    augment: Annotated[
        bool | None,
        typer.Option(
            "--augment/--no-augment",
            help="random crops, and flips of data that have a left and a right; with --recipe the default",
        ),
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(min=0, max=0.9, help="part of the training images to hold out; none, with --recipe 0.1"),
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="stop after so many epochs without a better validation NLL; keep the best")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; fp32, with --recipe bf16 on a GPU")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one")] = None,
    save_every: Annotated[int | None, typer.Option(help="steps between checkpoints, besides one each epoch")] = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; the same command again carries it on")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Train a network and score it on the test images.

    With --out the run can be stopped at any moment, and the same command carries it on; varlap evaluate then scores it.

    With --recipe it trains what varlap reproduce would, and everything else that is given changes the recipe.

    Example: varlap train digits --method vl --beta 0.01 --epochs 20 --out runs/digits

    Example: varlap train cifar10 --recipe sgd --beta 0.01 --set warmup=0.1 --out runs/cifar10
    """
    log_to_stderr(quiet=True)  # the progress shows where a run is carried on
    with user_mistakes():
        chosen = choose_device(device)
        given = {"epochs": epochs, "lr": lr, "batch_size": batch_size, "augment": augment, "validation": validation}
        given |= {"precision": precision, "model": None if model == "auto" else model}
        given = {name: value for name, value in given.items() if value is not None}
        if recipe is not None:
            made = by_recipe(recipe, data, method, beta, seed, given, settings or [], chosen)
        elif settings:
            raise ConfigError(f"--set {settings[0]} changes a setting of a recipe; give --recipe too, such as sgd")
        else:
            made = by_options(data, method, beta, seed, given)
        if patience is not None and not made.task.validation:
            raise ConfigError(
                f"--patience {patience} goes by held-out images, and there are none; add --validation 0.1"
            )
        warn_if_slow(chosen, made.label["model"], made.label.get("width", USUAL_WIDTH), "--model convnet")
        task, bnn, training = made.task, made.bnn.to(chosen), made.task.training
        history = fit(
            bnn,
            made.objective,
            training,
            validation=task.held_out,
            augment=augmentation(task.images, task.normalise) if made.augment else None,
            out=out,
            label=made.label,
            progress="none" if quiet or as_json else "auto",
            patience=patience,
            keep="last" if patience is None else "best",
            save_every=save_every,
            **made.settings,
        )
        if method == "laplace":
            laplace(bnn, training, beta=beta)
        scores = evaluate(bnn, task.test)
    # With what the task tells, `varlap evaluate` makes data and network again.
    named = {"data": data, "method": method, "beta": beta, "epochs": len(history.epochs)}
    result = named | {"augment": made.augment, "test": scores} | task.describe() | made.told
    result["origin"] = _origin(chosen, out)
    result["seconds"] = sum(row["seconds"] for row in history.epochs)
    if current_rank():
        return
    if out is not None:
        if not (out / "model").exists():
            bnn.save(out / "model")
        replace_file(out / RESULT, (json.dumps(finite(result), indent=1, allow_nan=False) + "\n").encode())
    if as_json:
        typer.echo(json.dumps(finite(result)))
    else:
        listed = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        Console().print(f"{data}, {method}: test {listed}")
        if out is not None:
            Console().print(f"varlap evaluate {shlex.quote(str(out))} scores it in other ways", highlight=False)


def _origin(device: torch.device, out: Path | None) -> dict[str, Any] | None:
    """Return where the training ran; a run that was finished before is only scored here, and keeps what it says."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if out is not None:
            return json.loads((out / RESULT).read_text()).get("origin")
    return origin(device) | {"device": str(device), "num_threads": torch.get_num_threads()}
