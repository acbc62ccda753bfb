"""`varlap bench step`: how long a step takes, beside MAP's."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from varlap.cli.mistakes import user_mistakes
from varlap.training.benchmark import METHODS, MODELS, BenchSpec, bench_step

app = typer.Typer(no_args_is_help=True, help="Measure speed.")


@app.callback()
def _main() -> None:
    """Keep `step` a verb while it is the only one."""


@app.command()
def step(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "convnet",
    batch_size: Annotated[int, typer.Option(help="items a step")] = 128,
    width: Annotated[int | None, typer.Option(help="the model's width, if not its own default")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one")] = None,
    precision: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    rounds: Annotated[int, typer.Option(help="how often each method's turn comes")] = 5,
    steps: Annotated[int, typer.Option(help="steps a turn")] = 24,
    methods: Annotated[str, typer.Option(help="comma-separated")] = ",".join(METHODS),
    out: Annotated[Path | None, typer.Option(help="also write the JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Time MAP, VI, VL and the obvious double backward, interleaved in one run.

    Example: varlap bench step --model preact-resnet-18 --device cuda --precision bf16
    """
    console = Console(stderr=as_json)
    with user_mistakes(), console.status("setting up") as status:
        spec = BenchSpec(
            model,
            width,
            batch_size,
            device or ("cuda" if torch.cuda.is_available() else "cpu"),
            precision,  # type: ignore[arg-type]
            rounds,
            steps,
            tuple(method.strip() for method in methods.split(",")),
        )
        result = bench_step(spec, lambda text: status.update(text))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        console.print(_table(result))


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
