"""`varlap evaluate`: score a finished run, and keep the predictions."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from varlap.cli.device import choose_device
from varlap.cli.mistakes import log_to_stderr, user_mistakes
from varlap.cli.table import score_table
from varlap.errors import ConfigError
from varlap.experiments import Evaluated, TrainedRun, assess, draw_figures
from varlap.files import finite
from varlap.metrics.bootstrap import checked_bootstrap
from varlap.posterior import BNN
from varlap.posthoc import fit_temperature
from varlap.predict.dispatch import DEFAULT_LINEARISED, DEFAULT_SAMPLES, How

USUAL_SAMPLES = {"mean": None, "sampled": DEFAULT_SAMPLES, "linearised": DEFAULT_LINEARISED}


def evaluate(
    run: Annotated[Path, typer.Argument(help="a folder that `varlap train DATA --out RUN` wrote")],
    how: Annotated[How, typer.Option(help="by the mean network, or by an average over the posterior")] = "mean",
    num_samples: Annotated[int | None, typer.Option(min=1, help="draws of that average; 10 or 30 by default")] = None,
    ood: Annotated[
        str | None, typer.Option(help="images to be told apart: a data set of the same size, letters, or rotated")
    ] = None,
    temperature_from_validation: Annotated[
        bool, typer.Option("--temperature-from-validation", help="also divide logits by what held-out images choose")
    ] = False,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="sets of items drawn for intervals; 1000 is usual, 0 for none")
    ] = 0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="images at a time; else 512, or 128 for draws on a CPU"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Score a finished run on its test images; scores and predictions go to RUN/evaluations.

    Their folder there is named by what was asked, such as sampled-20-samples; the same question replaces its answer.

    Example: varlap evaluate runs/digits --how linearised --ood letters
    """
    log_to_stderr(quiet=as_json)
    with user_mistakes():
        checked_bootstrap("evaluate", bootstrap)
        opened = TrainedRun.open(run)
        _check_variances(opened, how)
        task, bnn = opened.task, opened.bnn(choose_device(device))
        options: dict[str, Any] = {
            "how": how,
            "num_samples": num_samples,
            "seed": seed,
            "batch_size": batch_size,
        }
        temperature = _temperature(bnn, opened, options) if temperature_from_validation else None
        options |= {
            "ood": None if ood is None else task.outside(ood),
            "images": task.images.test_images,
            "bootstrap": bootstrap,
            "seconds": opened.seconds,
            "spec": opened.spec() | {"ood": ood, "predict_seed": seed},
        }
        found = [assess(bnn, task.test, name=opened.name, **options)]
        if temperature is not None:
            scaled = assess(
                bnn, task.test, name=f"{opened.name} + temperature scaling", temperature=temperature, **options
            )
            both = {"nll_scaled": scaled.scores["nll"], "temperature": temperature}
            found = [replace(each, scores={**each.scores, **both}) for each in (found[0], scaled)]
        folders = [_write(each, opened.folder) for each in found]
        if opened.result["method"] != "map":  # whose log σ were never trained
            draw_figures(bnn, opened.folder)
    if as_json:
        typer.echo(json.dumps(finite(_object(found, folders))))
        return
    console = Console(highlight=False)
    console.print(score_table(found, title=f"{task.data}, {len(task.test[1])} test images"))
    console.print(f"Scores and predictions: {', '.join(map(str, folders))}")


def _check_variances(run: TrainedRun, how: How) -> None:
    if run.result["method"] == "map" and how != "mean":
        raise ConfigError(
            f"{run.folder} was trained by MAP, which learns no variances, so --how {how} has nothing to average "
            "over; use --how mean, or train with --method laplace, vi or vl"
        )


def _temperature(bnn: BNN, run: TrainedRun, options: dict[str, Any]) -> float:
    held_out = run.task.held_out
    if held_out is None:
        raise ConfigError(
            f"{run.folder} was trained on all its images, so none are left to fit a temperature on; train with "
            "`varlap train ... --validation 0.1`"
        )
    return fit_temperature(bnn, held_out, **options)


def _write(found: Evaluated, run: Path) -> Path:
    folder = run / "evaluations" / _name(found.spec)
    try:
        found.write(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    return folder


def _name(spec: Mapping[str, Any]) -> str:
    """Name an evaluation by what was asked where that is not the default, so that others stay.

    Intervals are no part of it: with them the same evaluation says more.

    >>> spec = {"how": "sampled", "num_samples": 10, "predict_seed": 0, "temperature": 1.0, "ood": None}
    >>> _name(spec), _name(spec | {"num_samples": 20, "predict_seed": 1, "ood": "letters"})
    ('sampled', 'sampled-20-samples-seed-1-letters')
    """
    asked = {
        f"{spec['num_samples']}-samples": spec["num_samples"] != USUAL_SAMPLES[spec["how"]],
        f"seed-{spec['predict_seed']}": spec["predict_seed"] != 0,
        "scaled": spec["temperature"] != 1.0,
        str(spec["ood"]): spec["ood"] is not None,
    }
    return "-".join([spec["how"], *(word for word, is_said in asked.items() if is_said)])


def _object(found: list[Evaluated], folders: list[Path]) -> dict[str, Any]:
    """Return the unscaled evaluation, and with temperature scaling the scaled one beside it."""
    first = {"name": found[0].name, "scores": found[0].scores, "spec": found[0].spec, "folder": str(folders[0])}
    if len(found) > 1:
        first["scaled"] = {"scores": found[1].scores, "spec": found[1].spec, "folder": str(folders[1])}
    return first
