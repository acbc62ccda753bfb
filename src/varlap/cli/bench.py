"""`varlap bench step`: how long a step takes, beside MAP's."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from varlap.cli.device import choose_device
from varlap.cli.mistakes import user_mistakes
from varlap.errors import ConfigError
from varlap.files import replace_file
from varlap.training.benchmark import COMPARED_IN_GROWTH, METHODS, MODELS, BenchSpec, bench_step

app = typer.Typer(no_args_is_help=True, help="Measure speed.\n\nExample: varlap bench step --model convnet")


Model = Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")]
BatchSize = Annotated[int, typer.Option(help="items a step")]
Width = Annotated[int | None, typer.Option(help="the model's width, if not its own default")]
Depth = Annotated[int | None, typer.Option(help="the model's depth, if not its own default")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one")]
Numbers = Annotated[str, typer.Option("--precision", help="fp32 or bf16")]
Rounds = Annotated[int, typer.Option(help="how often each method's turn comes")]
Steps = Annotated[int, typer.Option(help="steps a turn")]
Methods = Annotated[str, typer.Option(help="which to time, separated by semicolons")]
Out = Annotated[Path | None, typer.Option(help="also write the JSON to this file")]
ALL, IN_GROWTH = ";".join(METHODS), ";".join(COMPARED_IN_GROWTH)
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


@app.command()
def step(
    model: Model = "convnet",
    batch_size: BatchSize = 128,
    width: Width = None,
    depth: Depth = None,
    device: Device = None,
    precision: Numbers = "fp32",
    rounds: Rounds = 5,
    steps: Steps = 24,
    methods: Methods = ALL,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time MAP, VI, VL and the obvious double backward, interleaved in one run.

    Example: varlap bench step --model preact-resnet-18 --device cuda --precision bf16
    """
    console = Console(stderr=as_json)
    with user_mistakes():
        with console.status("setting up") as status:
            spec = _spec(model, width, depth, batch_size, device, precision, rounds, steps, methods)
            result = bench_step(spec, lambda text: status.update(text))
        _tell(result, None if as_json else _table(result), out)


@app.command()
def growth(
    model: Model = "convnet",
    batch_size: BatchSize = 128,
    device: Device = None,
    precision: Numbers = "fp32",
    rounds: Rounds = 5,
    steps: Steps = 24,
    methods: Methods = IN_GROWTH,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time MAP and VL for other batch sizes, widths and depths: VL's cost should grow as MAP's does.

    Example: varlap bench growth --model convnet --device cpu
    """
    console = Console(stderr=as_json)
    with user_mistakes():
        with console.status("setting up") as status:
            spec = _spec(model, None, None, batch_size, device, precision, rounds, steps, methods)
            results = []
            for one in spec.growth():
                title = f"batch {one.batch_size}, width {one.width}, depth {one.depth}"
                results.append(bench_step(one, lambda text, title=title: status.update(f"{title}: {text}")))
        _tell({"results": results}, None if as_json else _growth_table(results), out)


def _spec(
    model: str,
    width: int | None,
    depth: int | None,
    batch_size: int,
    device: str | None,
    precision: Any,
    rounds: int,
    steps: int,
    methods: str,
) -> BenchSpec:
    chosen = str(choose_device(device))
    named = tuple(method.strip() for method in methods.split(";"))
    return BenchSpec(model, width, depth, batch_size, chosen, precision, rounds, steps, named)


def _tell(result: dict[str, Any], table: Table | None, out: Path | None) -> None:
    """Print the table, or without one the JSON; then write the file: where that fails, nothing is lost."""
    if table is None:
        typer.echo(json.dumps(result))
    else:
        Console().print(table)
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, (json.dumps(result, indent=1) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error}; choose another --out") from error


def _growth_table(results: list[dict[str, Any]]) -> Table:
    methods = [method for method in results[0]["methods"] if method != "MAP"]
    spec, origin = results[0]["spec"], results[0]["origin"]
    title = ", ".join([spec["model"], spec["precision"], origin["hardware"]])
    table = Table("batch", "width", "depth", "MAP, ms", *(f"{method}, × MAP" for method in methods), title=title)
    for result in results:
        sizes = (str(result["spec"][name]) for name in ("batch_size", "width", "depth"))
        ratios = (f"{result['methods'][method]['ratio_to_map']:.2f}" for method in methods)
        table.add_row(*sizes, f"{result['methods']['MAP']['median_ms']:.2f}", *ratios)
    return table


def _table(result: dict[str, Any]) -> Table:
    spec, origin = result["spec"], result["origin"]
    title = ", ".join([spec["model"], f"batch {spec['batch_size']}", spec["precision"], origin["hardware"]])
    table = Table("method", "ms a step", "spread", "× MAP", "setup s", "peak MB", title=title)
    for method, row in result["methods"].items():
        memory = "" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:.0f}"
        spread = f"{row['min_ms']:.2f} to {row['max_ms']:.2f}"
        table.add_row(
            method, f"{row['median_ms']:.2f}", spread, f"{row['ratio_to_map']:.2f}", f"{row['setup_s']:.1f}", memory
        )
    return table
