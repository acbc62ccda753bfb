"""`python -m varlap` is the command line."""

from varlap.cli import app

app()
