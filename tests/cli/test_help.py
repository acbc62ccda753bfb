"""The help teaches: every command and group has an example, made of arguments that exist."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import varlap
from varlap.cli import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(("varlap", *path)))
def test_the_help_has_an_example_whose_arguments_exist(path: tuple[str, ...]):
    command = COMMANDS[path]
    lines = [line.strip() for line in (command.help or "").splitlines()]
    examples = [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]
    assert examples
    for example in examples:
        name, *words = shlex.split(example)
        assert name == "varlap"
        assert tuple(words[: len(path)]) == path
        chosen = path
        while (*chosen, *words[len(chosen) : len(chosen) + 1]) in COMMANDS and len(chosen) < len(words):
            chosen = (*chosen, words[len(chosen)])
        target = COMMANDS[chosen]
        target.make_context("example", words[len(chosen) :], resilient_parsing=False)  # parses, does not run


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(("varlap", *path)))
def test_every_argument_and_option_is_explained(path: tuple[str, ...]):
    for parameter in COMMANDS[path].params:
        assert parameter.help, parameter.name
    answer = CliRunner().invoke(app, [*path, "--help"])
    assert answer.exit_code == 0
    assert "Example: varlap" in answer.stdout
    if not getattr(COMMANDS[path], "commands", None):
        assert "--json" in answer.stdout


def test_the_version_is_printed():
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.stdout) == (0, f"varlap {varlap.__version__}\n")
