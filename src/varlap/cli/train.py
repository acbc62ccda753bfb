"""`varlap train`: train a network on a data set, and carry the run on by the same command."""

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from varlap.cli.device import choose_device
from varlap.cli.mistakes import log_to_stderr, user_mistakes
from varlap.experiments import ImageTask
from varlap.experiments.augmentation import augmentation
from varlap.files import finite, replace_file
from varlap.metrics import evaluate
from varlap.objectives import MAP, VI, VL, Objective, VLHessian
from varlap.posterior import BNN
from varlap.posthoc import laplace
from varlap.streams import current_rank
from varlap.training import fit


class Method(StrEnum):
    """How to train."""

    map = "map"
    vi = "vi"
    vl = "vl"
    vl_hessian = "vl-hessian"
    laplace = "laplace"


OBJECTIVES: dict[Method, Callable[..., Objective]] = {
    Method.map: MAP,
    Method.vi: VI,
    Method.vl: VL,
    Method.vl_hessian: VLHessian,
    Method.laplace: MAP,  # and variances at its end
}


class Model(StrEnum):
    """What is trained."""

    auto = "auto"
    preact_resnet_18 = "preact-resnet-18"
    convnet = "convnet"
    mlp = "mlp"


def train(
    data: Annotated[str, typer.Argument(help="digits, fashion_mnist, mnist, cifar10, cifar100, svhn")],
    method: Annotated[Method, typer.Option(help="how to train")] = Method.vl,
    beta: Annotated[float, typer.Option(help="tempering of the KL: 1 is Bayes")] = 0.01,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = 40,
    lr: Annotated[float | None, typer.Option(help="of the means; 1e-3 for PreactResNet-18, else 3e-3")] = None,
    batch_size: Annotated[int, typer.Option(help="images a step")] = 128,
    seed: Annotated[int, typer.Option(help="of weights, batches and drawn labels")] = 0,
    model: Annotated[Model, typer.Option(help="auto: a small convnet for digits, else PreactResNet-18")] = Model.auto,
    augment: Annotated[bool, typer.Option(help="random crops, and flips of data that have a left and a right")] = False,
    validation: Annotated[float, typer.Option(min=0, max=0.9, help="part of the training images to hold out")] = 0.0,
    patience: Annotated[
        int | None, typer.Option(help="stop after so many epochs without a better validation NLL; keep the best")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one")] = None,
    save_every: Annotated[int | None, typer.Option(help="steps between checkpoints, besides one each epoch")] = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; the same command again carries it on")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Train a network and score it on the test images.

    With --out the run can be stopped at any moment, and the same command carries it on; varlap evaluate then scores it.

    Example: varlap train digits --method vl --beta 0.01 --epochs 20 --out runs/digits
    """
    log_to_stderr(quiet=True)  # the progress shows where a run is carried on
    with user_mistakes():
        chosen = choose_device(device)
        task = ImageTask(data, model.value, validation, seed)
        torch.manual_seed(seed)
        bnn = BNN(task.network().to(chosen))
        label = {"data": data, "method": method.value, "model": task.chosen_model, "validation": validation}
        training = task.training
        objective = OBJECTIVES[method](len(training[1]), beta=beta, seed=seed)
        usual_lr = 1e-3 if task.chosen_model == "preact-resnet-18" else 3e-3
        history = fit(
            bnn,
            objective,
            training,
            validation=task.held_out,
            augment=augmentation(task.images, task.normalise) if augment else None,
            out=out,
            label=label,
            progress="none" if quiet or as_json else "auto",
            epochs=epochs,
            batch_size=batch_size,
            lr=usual_lr if lr is None else lr,
            seed=seed,
            precision=precision,
            patience=patience,
            keep="last" if patience is None else "best",
            save_every=save_every,
        )
        if method is Method.laplace:
            laplace(bnn, training, beta=beta)
        scores = evaluate(bnn, task.test)
    # With what the task tells, `varlap evaluate` makes data and network again.
    told = {"beta": beta, "epochs": len(history.epochs), "augment": augment, "test": scores}
    result = label | told | task.describe()
    result["seconds"] = sum(row["seconds"] for row in history.epochs)
    if current_rank():
        return
    if out is not None:
        if not (out / "model").exists():
            bnn.save(out / "model")
        replace_file(out / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    if as_json:
        typer.echo(json.dumps(finite(result)))
    else:
        listed = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        Console().print(f"{data}, {method.value}: test {listed}")
