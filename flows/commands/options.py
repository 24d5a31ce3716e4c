"""Arguments and options that several commands have."""

from typing import Annotated

import typer

Preset = Annotated[
    str,
    typer.Argument(
        help="Name of a preset in conf/, or path of a YAML file; + joins several, such as quickstart+dapo."
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, for example train.lr=1e-6; repeatable.")
]
RunLocation = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run: its folder, s3://bucket/prefix, or the name of a folder in runs/."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Again = Annotated[
    bool, typer.Option("--again", help="Move a finished run of that name aside, and start anew.")
]
RedoFailed = Annotated[
    bool,
    typer.Option(
        "--redo-failed",
        help="Sample what failed or was cut of the open steps once more, as a further attempt.",
    ),
]
