"""`varlap train`: train a network on a data set, and carry the run on by the same command."""

import json
import logging
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from varlap.cli.mistakes import user_mistakes
from varlap.data import ArrayData, Normaliser, crop_and_flip, load
from varlap.errors import ConfigError, Interrupted
from varlap.metrics import evaluate
from varlap.models import convnet, mlp, preact_resnet18
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
    augment: Annotated[bool, typer.Option(help="random crops and flips")] = False,
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

    Example: varlap train digits --method vl --beta 0.01 --epochs 20 --out runs/digits
    """
    _log_to_stderr(quiet or as_json)
    with user_mistakes():
        chosen = _device(device)
        images = load(data)
        model = _chosen(model, images)
        torch.manual_seed(seed)
        bnn = BNN(_network(model, images).to(chosen))
        normalise = Normaliser.of(images.train_images)
        training, held_out, test = _parts(images, normalise, validation, seed)
        label = {"data": data, "method": method.value, "model": model.value, "validation": validation}
        objective = OBJECTIVES[method](len(training[1]), beta=beta, seed=seed)
        try:
            history = fit(
                bnn,
                objective,
                training,
                validation=held_out,
                augment=crop_and_flip if augment else None,
                out=out,
                label=label,
                progress="none" if quiet or as_json else "auto",
                epochs=epochs,
                batch_size=batch_size,
                lr=lr or (1e-3 if model is Model.preact_resnet_18 else 3e-3),
                seed=seed,
                precision=precision,
                patience=patience,
                keep="last" if patience is None else "best",
                save_every=save_every,
            )
        except Interrupted as stop:
            Console(stderr=True).print(str(stop))
            raise typer.Exit(stop.exit_status) from stop
        if method is Method.laplace:
            laplace(bnn, training, beta=beta)
        scores = evaluate(bnn, test)
    result = label | {"beta": beta, "epochs": len(history.epochs), "seed": seed, "test": scores}
    result["normaliser"] = {"mean": normalise.mean, "std": normalise.std}  # varlap.data.Normaliser(**it)(images)
    if current_rank():
        return
    if out is not None:
        if not (out / "model").exists():
            bnn.save(out / "model")
        (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        listed = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        Console().print(f"{data}, {method.value}: test {listed}")


def _device(wanted: str | None) -> torch.device:
    """Choose the device; under torchrun each rank has its own GPU."""
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {wanted} cannot be used here; try cpu ({str(error).splitlines()[0]})") from error
    return device


def _log_to_stderr(quiet: bool) -> None:
    """Let people hear of warnings, and of a run that is carried on."""
    logging.basicConfig(format="varlap: %(message)s")
    logging.getLogger("varlap.training.loop").setLevel(logging.WARNING if quiet else logging.INFO)


def _chosen(model: Model, images: ArrayData) -> Model:
    if model is not Model.auto:
        return model
    return Model.convnet if images.image_shape[1] < 28 else Model.preact_resnet_18


def _network(model: Model, images: ArrayData) -> nn.Module:
    channels, height, width = images.image_shape
    if model is Model.mlp:
        return nn.Sequential(nn.Flatten(), mlp(channels * height * width, images.num_classes, hidden=(100, 100)))
    if model is Model.convnet:
        return convnet(channels, images.num_classes, image_size=height)
    return preact_resnet18(images.num_classes, channels)


def _parts(images: ArrayData, normalise: Normaliser, validation: float, seed: int) -> tuple[Any, Any, Any]:
    """Normalise, and hold a part of the training images out."""
    x, y = normalise(images.train_images), images.train_labels
    test = normalise(images.test_images), images.test_labels
    num_held_out = round(validation * len(y))
    if not num_held_out:
        return (x, y), None, test
    if num_held_out >= len(y):
        raise ConfigError(f"--validation {validation} leaves no training images; hold out less")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held_out, kept = order[:num_held_out], order[num_held_out:]
    return (x[kept], y[kept]), (x[held_out], y[held_out]), test
