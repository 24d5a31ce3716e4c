"""Commands that use what was generated before once more: other rewards, other training, the same steps again."""

import typer

PANEL = "Again"
commands = typer.Typer()
