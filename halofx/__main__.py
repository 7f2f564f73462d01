"""``python -m halofx``: the command line."""

from halofx.cli import app

app(prog_name="python -m halofx")
