"""`varlap reproduce`: the paper's tables and figures, from data to page."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from varlap.cli.device import choose_device, warn_if_slow
from varlap.cli.dry_run import show_plan
from varlap.cli.mistakes import log_to_stderr, user_mistakes
from varlap.cli.report import show_parts
from varlap.cli.reproduce_uci import reproduce_uci
from varlap.cli.settings import with_settings
from varlap.cli.stopping import page_if_stopped
from varlap.errors import ConfigError, MissingExtraError, VarlapError, did_you_mean, warn
from varlap.experiments import Experiment, RunSpec, Store, run_grid
from varlap.experiments.choice import final_runs
from varlap.experiments.final_line import record, recorded
from varlap.experiments.grid_progress import GridProgress
from varlap.experiments.grid_run import Outcome, check_data
from varlap.experiments.known_runs import KnownRuns
from varlap.experiments.plan import PlannedRun, plan
from varlap.report.reproduction import as_json as plain, write_reproduction
from varlap.report.sweeps import sweeps

Recipe = Literal["paper", "ours", "sgd"]


def reproduce(
    what: Annotated[
        str,
        typer.Argument(help="table-1, table-2, figure-1, figure-2, uci, miniature, or your own TOML file"),
    ],
    data: Annotated[list[str] | None, typer.Option(help="only this data set; may be repeated")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="length of each run; the schedule scales with it")] = None,
    budget: Annotated[float | None, typer.Option(help="minutes; the same command carries on with what is left")] = None,
    recipe: Annotated[Recipe, typer.Option(help="the paper's settings, or ours for Adam or for SGD")] = "paper",
    seeds: Annotated[int | None, typer.Option(min=1, help="number of seeds, counted from 0")] = None,
    final: Annotated[
        bool, typer.Option("--final", help="train only at the β that a finished sweep in RUNS chose")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="rerun diverged runs")] = False,
    linearised: Annotated[
        bool | None,
        typer.Option("--linearised/--no-linearised", help="score linearised predictions too (the default), or not"),
    ] = None,
    splits: Annotated[
        int | None, typer.Option(min=1, help="uci only: number of splits, counted from the first")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="any other setting of a run: NAME=VALUE, or NAME=none; may be repeated"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RUNS",
            help="folder of results; runs/paper, or runs/NAME for figure-2, miniature, uci and your own file",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list what is stored, held by others or pending; train nothing")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Run an experiment of the paper and write its tables and figures beside the paper's numbers.

    Each result is a JSON file in RUNS. Results that are there are not computed again, and interrupted runs carry on.
    The page RUNS/report/report.html shows all that RUNS holds. The exit status is 1 if a run diverged, now or before,
    or if the device has too little memory for it; such runs are named at the end.

    Example: varlap reproduce table-1 --data cifar10 --epochs 50 --budget 60
    """
    log_to_stderr(quiet or as_json)
    with user_mistakes():
        _check_budget(budget)
        if what == "uci":  # tables with splits of their own, no grid of images
            _check_for_uci(
                {
                    "--recipe": recipe != "paper",
                    "--seeds": seeds,
                    "--final": final,
                    "--again": again,
                    "--linearised" if linearised else "--no-linearised": linearised is not None,
                    "--set": settings,
                    "--dry-run": dry_run,
                },
                device,
            )
            chosen = {"data": data or (), "splits": splits, "epochs": epochs, "budget": budget}
            reproduce_uci(out or Path("runs/uci"), **chosen, quiet=quiet, as_json=as_json)
            return
        if what not in (names := [*Experiment.names(), "uci"]) and not what.endswith(".toml"):
            raise ConfigError(f"there is no experiment {what!r}; {did_you_mean(what, names)}")
        if splits is not None:
            raise ConfigError(f"--splits is for uci, whose tables come with them; {what} has --seeds")
        changes = _changes(data, epochs, seeds, linearised, settings)
        experiment = _experiment(what, recipe, changes)
        store = Store(out or _default_folder(what, experiment.name))
        _check_folder(store)
        chosen_device = choose_device(device)
        progress = GridProgress(quiet=quiet or as_json)
        choice = final_runs(experiment.specs, store) if final else None
        specs = experiment.specs if choice is None else choice.specs
        planned = plan(specs, store, device=chosen_device, again=again)
        if dry_run:
            _dry_run(experiment, specs, planned, store, again=again, as_json=as_json)
            return
        check_data(specs, store, KnownRuns(store, again))
        _warn_if_slow(planned, chosen_device)
        if choice is not None:
            record(choice.lines, store)
            for line in choice.chosen:
                progress.say(line)
        with page_if_stopped(store):
            outcome = run_grid(
                specs,
                store,
                device=chosen_device,
                budget_s=None if budget is None else 60 * budget,
                again=again,
                progress=progress,
            )
        page = _report(store, outcome, quiet or as_json) if outcome.results else None
    _tell(experiment, specs, store, outcome, page, as_json)
    if outcome.failed or outcome.out_of_memory:
        raise typer.Exit(1)


def _check_for_uci(given: dict[str, Any], device: str | None) -> None:
    for option, value in given.items():
        if value:
            raise ConfigError(f"{option} is for images; uci takes --data, --splits, --epochs, --budget and --out")
    if device not in (None, "cpu"):
        raise ConfigError(f"--device {device}: uci runs on the CPU, its networks being so small; leave it out")


def _warn_if_slow(planned: Sequence[PlannedRun], device: torch.device) -> None:
    """Say at once where the largest of the runs to come will be slow."""
    pending = [run.spec for run in planned if run.state == "pending"]
    if pending:
        largest = max(pending, key=lambda spec: (spec.model == "preact-resnet-18", spec.width))
        warn_if_slow(device, largest.model, largest.width, "--set width=8 --set num_train=5000 --epochs 20")


def _dry_run(
    experiment: Experiment,
    specs: Sequence[RunSpec],
    planned: Sequence[PlannedRun],
    store: Store,
    *,
    again: bool,
    as_json: bool,
) -> None:
    show_plan(planned, {"experiment": experiment.name, "out": str(store.folder)}, as_json)
    try:
        check_data(specs, store, KnownRuns(store, again))
    except VarlapError as error:
        warn(f"without --dry-run this would be refused: {error}")


def _experiment(what: str, recipe: str, changes: dict[str, Any]) -> Experiment:
    read = Experiment.read if what.endswith(".toml") else Experiment.named
    return read(what, recipe=recipe, **changes)


def _default_folder(what: str, name: str) -> Path:
    """Return where results go: to those of the paper, unless they are of other β, further trials in its tables."""
    apart = ("figure-2", "miniature")
    if not what.endswith(".toml"):
        return Path("runs") / (name if name in apart else "paper")
    if name in ("paper", "uci", *apart):
        raise ConfigError(f"{what}: runs/{name} is for a shipped experiment; rename the file, or give another --out")
    return Path("runs") / name


def _changes(
    data: list[str] | None, epochs: int | None, seeds: int | None, linearised: bool | None, settings: list[str] | None
) -> dict[str, Any]:
    options: dict[str, tuple[str, Any]] = {}  # by setting, what was typed and what it means
    if data:
        options["data"] = " ".join(f"--data {each}" for each in data), list(data)
    if epochs is not None:
        options["epochs"] = f"--epochs {epochs}", epochs
    if seeds is not None:
        options["seed"] = f"--seeds {seeds}", list(range(seeds))
    if linearised is not None:
        options["linearised"] = "--linearised" if linearised else "--no-linearised", linearised
    return with_settings(options, settings or [], elsewhere={})


def _check_budget(budget: float | None) -> None:
    if budget is not None and not budget > 0:
        raise ConfigError(f"--budget {budget:g} must be a positive number of minutes")


def _check_folder(store: Store) -> None:
    """Refuse a folder that cannot be made, before the work; what is made to find out is removed again."""
    made = [folder for folder in (store.folder, *store.folder.parents) if not folder.exists()]
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {store.folder} cannot be made: {error}; choose another --out") from error
    with contextlib.suppress(OSError):  # another process may have put something there
        for folder in made:
            folder.rmdir()


def _report(store: Store, outcome: Outcome, quiet: bool) -> Path | None:
    try:
        return write_reproduction(store, store.folder / "report", [result.spec for result in outcome.results])
    except MissingExtraError as error:
        if not quiet:
            typer.echo(f"varlap: no report was written: {error}", err=True)
        return None


def _tell(
    experiment: Experiment,
    specs: tuple[RunSpec, ...],
    store: Store,
    outcome: Outcome,
    page: Path | None,
    as_json: bool,
) -> None:
    # β are compared as on the page, with what earlier calls have left in the store.
    keys = {result.spec.key() for result in outcome.results}
    parts = [
        part
        for part in sweeps(store, recorded(store))
        if any(result.spec.key() in keys for result in (*part.results, *part.diverged))
    ]
    if as_json:
        counts = {"runs": len(specs), "computed": outcome.num_computed, "left": len(outcome.left)}
        result = {"experiment": experiment.name, "out": str(store.folder), "report": page and str(page), **counts}
        result |= {"failed": outcome.failed, "out_of_memory": outcome.out_of_memory}
        typer.echo(json.dumps(result | plain(parts, experiment.title), allow_nan=False))
        return
    console = Console(highlight=False)
    show_parts(console, parts)
    for name, reason in outcome.failed.items():
        console.print(f"{name} diverged: {reason}", markup=False)
    if outcome.failed:
        console.print("What has diverged is not run again without --again")
    for name in outcome.out_of_memory:
        console.print(f"{name}: the device has too little memory for it", markup=False)
    if outcome.left:
        number = len(outcome.left)
        console.print(f"{number} {'run is' if number == 1 else 'runs are'} left; the same command carries on")
    if outcome.results and not outcome.num_computed and not outcome.left:
        console.print(
            f"{len(outcome.results)} of {len(specs)} runs were in {store.folder}; none was trained", markup=False
        )
    if page is not None:
        console.print(f"[bold]{page.resolve().as_uri()}[/]", soft_wrap=True)
