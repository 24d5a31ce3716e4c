"""Commands that show what a run's data sets hold; they change none of it."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import AsJson, RunLocation
from tasks.errors import ConfigError

PANEL = "Look"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def inspect(
    run: RunLocation,
    steps: Annotated[bool, typer.Option("--steps", help="A row a step; so it is by default.")] = False,
    groups: Annotated[bool, typer.Option("--groups", help="A row a group; so it is with --step 3.")] = False,
    trajectories: Annotated[
        bool,
        typer.Option("--trajectories", help="A row a trajectory; so it is with --group, --status, --reward."),
    ] = False,
    step: Annotated[str, typer.Option(metavar="A[:B]", help="These steps, both included.")] = "",
    group: Annotated[int | None, typer.Option(help="This group.")] = None,
    status: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="complete, truncated, failed, cancelled, unscored; of groups: trained, or why they are not.",
        ),
    ] = "",
    env: Annotated[str, typer.Option(help="This environment.")] = "",
    reward: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Rewards, of groups their means, both included.")
    ] = "",
    scorer: Annotated[
        str, typer.Option(metavar="NAME@VERSION", help="Rewards by this scorer; the run's own by default.")
    ] = "",
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Held-out trajectories; --step is their policy version.")
    ] = False,
    sort: Annotated[
        str,
        typer.Option(
            metavar="[-]COLUMN",
            help="By this column; - is largest first. An unknown one says which there are.",
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=0, help="Most rows; 0: all. Tables of trajectories: 100.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show steps, groups or trajectories, filtered and sorted."""
    from flows.looking.inspection import view
    from flows.looking.selection import Interval, Selection, level_of, names_in
    from flows.looking.terminal import print_json, print_view
    from flows.running.folder import existing_run

    selection = Selection(
        level=level_of(steps=steps, groups=groups, trajectories=trajectories),
        steps=Interval.parse("--step", step) if step else None,
        group=group,
        status=names_in("--status", status),
        env=env,
        reward=Interval.parse("--reward", reward) if reward else None,
        scorer=scorer,
        evaluations=evaluations,
        sort=sort,
        limit=0 if limit is None and as_json else limit,
    )
    shown = view(existing_run(run), selection)
    if as_json:
        print_json(shown.values)
    else:
        print_view(shown)


@commands.command(rich_help_panel=PANEL)
def show(
    run: RunLocation,
    trajectory: Annotated[
        str,
        typer.Argument(metavar="TRAJECTORY", help="GROUP.SAMPLE such as 12.3, v10.0.greedy, or a whole id."),
    ],
    tokens: Annotated[bool, typer.Option("--tokens", help="Its tokens too, by log-probability.")] = False,
    by: Annotated[
        str,
        typer.Option(
            metavar="advantage|logprob|entropy|ratio",
            help="Its tokens, coloured by this; the last two are the trainer's.",
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="FOLDER", help="Model folder whose tokenizer it is; the run's by default.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show one trajectory: what became of it, the conversation, its tokens."""
    from dataclasses import asdict

    from flows.looking.found import find_trajectory
    from flows.looking.show import print_trajectory
    from flows.looking.terminal import print_json, terminal
    from flows.looking.token_page import measure, print_tokens, run_tokenizer, tokens_of
    from flows.running.folder import existing_run
    from tasks.errors import ConfigError

    shown_by = measure(by)
    folder = existing_run(run)
    found = find_trajectory(folder, trajectory)
    with_tokens, tokenizer = tokens or bool(by), None
    if with_tokens:
        try:
            tokenizer = run_tokenizer(folder, model)
        except ConfigError as error:
            if model:
                raise
            typer.echo(f"rollmill: tokens are shown without their text: {error}", err=True)
    listed = tokens_of(found, tokenizer) if with_tokens else []
    if as_json:
        print_json(found.values() | ({"tokens": [asdict(each) for each in listed]} if with_tokens else {}))
        return
    console = terminal()
    print_trajectory(console, found)
    if with_tokens:
        print_tokens(console, folder, found, listed, shown_by)


@commands.command(rich_help_panel=PANEL)
def view(
    run: RunLocation,
    port: Annotated[
        int | None,
        typer.Option(help="Loopback port; 4300 by default, or the next one that is free.", min=0, max=65535),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    refresh_s: Annotated[
        float, typer.Option(help="Seconds between two looks for something new.", min=0.2, max=3600)
    ] = 2.0,
) -> None:
    """Open a local web page over a run: curves, tables, trajectories token by token, two scorers or policies."""
    from flows.running.folder import existing_run
    from flows.viewer.serve import serve

    serve(existing_run(run), port, refresh_s, opens_browser=browser)


@commands.command(rich_help_panel=PANEL)
def plot(
    run: RunLocation,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A .png, .svg, .pdf or .jpg; RUN/plot.png, of a run on S3 in its folder here.",
        ),
    ] = None,
) -> None:
    """Draw a run by step: reward, length, entropy, staleness, drops, seconds."""
    from flows.looking.plot import plot_run
    from flows.running.folder import existing_run

    typer.echo(plot_run(existing_run(run), output))


@commands.command(rich_help_panel=PANEL)
def spans(
    run: RunLocation,
    step: Annotated[str, typer.Option(metavar="A[:B]", help="These steps, both included.")] = "",
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev instead.")
    ] = None,
    otlp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send them to an OpenTelemetry receiver instead, by OTLP over HTTP; http://127.0.0.1:4318 for example.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show where the time of steps went: owners, waits and their causes, the critical path, what would shorten it."""
    from flows.looking.ledger_views import ledger_values, ledger_views
    from flows.looking.run_ledger import read_ledger
    from flows.looking.selection import Interval
    from flows.looking.span_export import send_otlp, write_perfetto
    from flows.looking.terminal import print_json, print_view
    from flows.running.folder import existing_run

    folder = existing_run(run)
    asked = Interval.parse("--step", step) if step else None
    if as_json and (perfetto is not None or otlp):
        raise ConfigError("--json", "true", "it is for the tables; leave it out with --perfetto and --otlp")
    if perfetto is not None:
        typer.echo(write_perfetto(folder, asked, perfetto))
    if otlp:
        typer.echo(send_otlp(folder, asked, otlp))
    if perfetto is not None or otlp:
        return
    ledger = read_ledger(folder, asked)
    if as_json:
        print_json(ledger_values(folder.location, ledger))
        return
    for view in ledger_views(folder.name, ledger):
        print_view(view)


@commands.command(rich_help_panel=PANEL)
def export(
    run: RunLocation,
    to: Annotated[str, typer.Option("--to", metavar="parquet|jsonl", help="Format of the files.")],
    datasets: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset", metavar="NAME", help="This data set; repeatable. All that have rows by default."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for them; NAME-FORMAT here by default.")
    ] = None,
) -> None:
    """Write data sets as Parquet or JSON lines, a file each."""
    from flows.looking.terminal import print_exported
    from flows.running.folder import existing_run
    from tasks.store.export import export as write
    from tasks.store.export import form_of

    form, folder = form_of(to), existing_run(run)
    print_exported(write(folder, output or Path(f"{folder.name}-{to}"), form, datasets or ()))


@commands.command(rich_help_panel=PANEL)
def verify(run: RunLocation, as_json: AsJson = False) -> None:
    """Check every byte and row that is stored of a run; exit status 1: something is wrong, 2: it could not be checked."""
    from flows.looking.verification import verify as verify_run
    from flows.running.folder import existing_run
    from tasks.errors import StoreError

    try:
        is_right = verify_run(existing_run(run), as_json=as_json)
    except StoreError as error:
        typer.echo(f"rollmill: {error}", err=True)
        raise typer.Exit(2) from error
    if not is_right:
        raise typer.Exit(1)
