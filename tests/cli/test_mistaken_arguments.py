"""A mistake in the arguments is one line on stderr and exit status 2, whoever finds it."""

import pytest
from typer.testing import CliRunner

from varlap.cli import app


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "digits", "--method", "vll"], "is not one of 'map', 'vi', 'vl', 'vl-hessian', 'laplace'; see"),
        (["train", "digits", "--seeed", "3"], "No such option: --seeed"),
        (["trian"], "No such command 'trian'. Did you mean 'train'? see"),
        (["train"], "Missing argument"),
        (["--versoin"], "No such option: --versoin"),
        (["reproduce", "table-1", "--epochs", "0"], "Invalid value for '--epochs'"),
        (["bench", "step", "--model", "resnet"], "unknown model 'resnet'"),
        (["reproduce", "table-3"], "there is no experiment 'table-3'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], line: str):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert not done.stdout
    (said,) = done.stderr.splitlines()
    assert said.startswith("varlap: ")
    assert line in said


@pytest.mark.parametrize("arguments", [[], ["data"], ["bench"]])
def test_a_group_without_a_command_shows_its_help(arguments: list[str]):
    done = CliRunner().invoke(app, arguments)
    assert "Usage: " in done.output
    assert "Example: varlap" in done.output
