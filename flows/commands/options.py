"""Arguments and options that several commands share."""

from typing import Annotated

import typer

Preset = Annotated[
    str,
    typer.Argument(
        help="Name of a preset in conf/, or path of a YAML file; + combines several, such as quickstart+dapo."
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, such as train.lr=1e-6; repeatable.")
]
RunLocation = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run: its folder, s3://bucket/prefix, or the name of a folder in runs/."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Again = Annotated[
    bool,
    typer.Option("--again", help="Move a finished run of that name to NAME-N, and start a new one."),
]
RedoFailed = Annotated[
    bool,
    typer.Option(
        "--redo-failed",
        help="Sample failed trajectories of the open steps again, and score again what the scorer failed on.",
    ),
]
