"""A mistake in the arguments is one line on stderr and exit status 2, whoever finds it."""

import sys
import warnings

import pytest
from typer.testing import CliRunner

from varlap.cli import app
from varlap.data import Stored
from varlap.errors import warn


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "digits", "--method", "vll"], "'vl-hessian', 'laplace'; did you mean 'vl'? see"),
        (["train", "digits", "--method", "dropout"], "is not one of 'map', 'vi', 'vl', 'vl-hessian', 'laplace'; see"),
        (["train", "digits", "--seeed", "3"], "No such option: --seeed"),
        (["trian"], "No such command 'trian'. Did you mean 'train'? see"),
        (["train"], "Missing argument"),
        (["--versoin"], "No such option: --versoin"),
        (["reproduce", "table-1", "--epochs", "0"], "Invalid value for '--epochs'"),
        (["bench", "step", "--model", "resnet"], "unknown model 'resnet'"),
        (["bench", "step", "--device", "gpu"], "--device gpu is none that torch knows; choose cpu or cuda"),
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


@pytest.mark.filterwarnings("default::varlap.errors.VarlapWarning")
def test_a_warning_is_one_line_that_shows_no_code(monkeypatch: pytest.MonkeyPatch):
    def find_stored() -> list[Stored]:
        warn("mind the gap")
        warnings.warn("of another library", DeprecationWarning, stacklevel=1)
        return []

    monkeypatch.setattr(sys.modules["varlap.cli.data"], "find_stored", find_stored)
    usual = warnings.showwarning
    with pytest.warns(DeprecationWarning, match="of another library") as caught:
        done = CliRunner().invoke(app, ["data", "list", "--json"])
    assert done.stderr == "varlap: warning: mind the gap\n"
    assert [one.category for one in caught] == [DeprecationWarning]
    assert warnings.showwarning is usual


@pytest.mark.parametrize("arguments", [[], ["data"], ["bench"]])
def test_a_group_without_a_command_shows_its_help(arguments: list[str]):
    done = CliRunner().invoke(app, arguments)
    assert "Usage: " in done.output
    assert "Example: varlap" in done.output
