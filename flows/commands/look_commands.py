"""The panel "Look" of `rollmill --help`: commands that read a run and change nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.flows.commands.options import AsJson, RunLocation
from rollmill.tasks.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.tasks.look.tables.selection import Selection
    from rollmill.tasks.look.tables.view import View
    from rollmill.tasks.store.folders import RunFolder

PANEL = "Look"
commands = typer.Typer()

RunLocations = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Runs, each as for the other commands.")
]
Costs = Annotated[
    bool,
    typer.Option(
        "--costs", help="Seconds of servers, ranks and scorers, by what became of the trajectories."
    ),
]
Steps = Annotated[str, typer.Option(metavar="A[:B]", help="Only these steps, both included.")]
Statuses = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help="complete, truncated, failed, cancelled, unscored; for groups: trained, or the reason why not.",
    ),
]
Rewards = Annotated[
    str, typer.Option(metavar="LOW:HIGH", help="Only these rewards, both included; for groups their means.")
]
SortColumn = Annotated[
    str,
    typer.Option(
        metavar="[-]COLUMN",
        help="Sort by this column, with - largest first; an unknown one lists the columns.",
    ),
]


@commands.command("list", rich_help_panel=PANEL)
def list_runs(
    root: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder of runs, or s3://bucket/prefix; default: runs.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Maximum number of runs; 0: all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, newest first: state, steps, last held-out reward and accuracy."""
    from rollmill.tasks.look.tables.run_list import make_runs_view
    from rollmill.tasks.look.terminal.output import print_view
    from rollmill.tasks.store.config import StoreConfig

    print_view(make_runs_view(root or StoreConfig().root, limit), as_json=as_json)


@commands.command(rich_help_panel=PANEL)
def inspect(
    run: RunLocation,
    steps: Annotated[bool, typer.Option("--steps", help="One row per step; the default.")] = False,
    groups: Annotated[
        bool, typer.Option("--groups", help="One row per group; the default with --step 3.")
    ] = False,
    trajectories: Annotated[
        bool,
        typer.Option(
            "--trajectories", help="One row per trajectory; the default with --group, --status, --reward."
        ),
    ] = False,
    costs: Costs = False,
    step: Steps = "",
    group: Annotated[int | None, typer.Option(help="Only this group.")] = None,
    status: Statuses = "",
    env: Annotated[str, typer.Option(help="Only this environment.")] = "",
    reward: Rewards = "",
    scorer: Annotated[
        str, typer.Option(metavar="NAME@VERSION", help="Rewards by this scorer; default: the run's own.")
    ] = "",
    evaluations: Annotated[
        bool,
        typer.Option("--evaluations", help="Held-out trajectories; --step selects their policy version."),
    ] = False,
    sort: SortColumn = "",
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**31 - 1, help="Maximum number of rows; 0: all; default for trajectories: 100."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show steps, groups, trajectories or costs, filtered and sorted."""
    from rollmill.tasks.look.tables.selection import Interval, Selection, parse_level, parse_names
    from rollmill.tasks.look.terminal.output import print_view
    from rollmill.tasks.store.run.run_search import find_run

    selection = Selection(
        level=parse_level(steps=steps, groups=groups, trajectories=trajectories, costs=costs),
        steps=Interval.parse("--step", step) if step else None,
        group=group,
        status=parse_names("--status", status),
        env=env,
        reward=Interval.parse("--reward", reward) if reward else None,
        scorer=scorer,
        evaluations=evaluations,
        sort=sort,
        limit=0 if limit is None and as_json else limit,
    )
    print_view(_select(find_run(run), selection, costs=costs), as_json=as_json)


def _select(folder: "RunFolder", selection: "Selection", *, costs: bool) -> "View":
    # Only the costs need the modules that read spans, which take long to import.
    if costs:
        from rollmill.tasks.look.tables.cost_view import select_costs_view

        return select_costs_view(folder, selection)
    from rollmill.tasks.look.tables.run_tables import select_view

    return select_view(folder, selection)


@commands.command(rich_help_panel=PANEL)
def show(
    run: RunLocation,
    trajectory: Annotated[
        str,
        typer.Argument(metavar="TRAJECTORY", help="GROUP.SAMPLE such as 12.3, v10.0.greedy, or a whole id."),
    ],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show its tokens too, coloured by log-probability.")
    ] = False,
    by: Annotated[
        str,
        typer.Option(
            metavar="advantage|logprob|entropy|ratio",
            help="Show its tokens, coloured by this; the last two come from the trainer.",
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="FOLDER", help="Model folder with the tokenizer; default: the run's model.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show one trajectory: its outcome, the conversation, its tokens."""
    from dataclasses import asdict

    from rollmill.flows.configuration.recipe import run_tokenizer
    from rollmill.tasks.errors import ConfigError
    from rollmill.tasks.look.tables.trajectory_record import find_trajectory
    from rollmill.tasks.look.terminal.output import open_console, print_json
    from rollmill.tasks.look.terminal.trajectory_print import print_trajectory
    from rollmill.tasks.look.terminal.trajectory_tokens import (
        check_has_values,
        list_tokens,
        parse_measure,
        print_tokens,
    )
    from rollmill.tasks.store.run.run_search import find_run

    shown_by = parse_measure(by)
    folder = find_run(run)
    found = find_trajectory(folder, trajectory)
    check_has_values(found, shown_by)
    with_tokens, tokenizer = tokens or bool(by), None
    if with_tokens:
        try:
            tokenizer = run_tokenizer(folder, model)
        except ConfigError as error:
            # A model folder that was named must have a tokenizer.
            if model:
                raise
            typer.echo(f"rollmill: tokens are shown without text: {error}", err=True)
    listed = list_tokens(found, tokenizer) if with_tokens else []
    if as_json:
        print_json(found.values() | ({"tokens": [asdict(each) for each in listed]} if with_tokens else {}))
        return
    console = open_console()
    print_trajectory(console, found)
    if with_tokens:
        print_tokens(console, folder, found, listed, shown_by)


@commands.command(rich_help_panel=PANEL)
def view(
    runs: RunLocations,
    port: Annotated[
        int | None,
        typer.Option(help="Loopback port; default: 4300, or the next free one.", min=0, max=65535),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    refresh_s: Annotated[
        float, typer.Option(help="Seconds between two checks for new data.", min=0.2, max=3600)
    ] = 2.0,
) -> None:
    """Open a local web page of a run: curves, tables, trajectories by token, comparisons; further runs are shown beside it."""
    from rollmill.flows.configuration.recipe import run_tokenizer
    from rollmill.tasks.look.web.app import serve_viewer
    from rollmill.tasks.store.run.run_search import distinct_runs, find_run

    folder, *others = distinct_runs(map(find_run, runs))
    serve_viewer(folder, run_tokenizer, port, refresh_s, opens_browser=browser, others=others)


@commands.command(rich_help_panel=PANEL)
def plot(
    runs: RunLocations,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A .png, .svg, .pdf or .jpg file; default: RUN/plot.png, for a run on S3 in its local folder; for several runs runs.png.",
        ),
    ] = None,
) -> None:
    """Plot a run by step: reward, length, entropy, staleness, drops, seconds; of several runs a line each."""
    from rollmill.tasks.look.terminal.plot import plot_run
    from rollmill.tasks.store.run.run_search import distinct_runs, find_run

    folder, *others = distinct_runs(map(find_run, runs))
    typer.echo(plot_run(folder, output, others))


@commands.command(rich_help_panel=PANEL)
def spans(
    run: RunLocation,
    step: Steps = "",
    otlp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send the spans to an OpenTelemetry receiver instead, by OTLP over HTTP, such as http://127.0.0.1:4318.",
        ),
    ] = "",
    trajectories: Annotated[
        bool,
        typer.Option(
            "--trajectories",
            help="With --otlp: send the trajectories of the last step, or of --step, instead, as conversations.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show where the time of steps went: owners, waits and causes, the critical path, what would shorten it."""
    from rollmill.tasks.look.ledger.run_ledger import read_ledger
    from rollmill.tasks.look.tables.ledger_tables import ledger_values, make_ledger_views
    from rollmill.tasks.look.tables.selection import Interval
    from rollmill.tasks.look.terminal.output import print_json, print_view
    from rollmill.tasks.observe.sinks.sink_check import check_receiver
    from rollmill.tasks.store.run.run_search import find_run

    folder = find_run(run)
    interval = Interval.parse("--step", step) if step else None
    if as_json and otlp:
        raise ConfigError("--json", "true", "it prints the tables; leave it out with --otlp")
    if trajectories and not otlp:
        raise ConfigError("--trajectories", "true", "it sends them: give the receiver with --otlp URL")
    if otlp:
        check_receiver("--otlp", otlp)
        if trajectories:
            from rollmill.tasks.look.export.trajectory_traces import send_trajectories

            typer.echo(send_trajectories(folder, interval, otlp))
            return
        from rollmill.tasks.look.export.otlp_export import send_otlp

        typer.echo(send_otlp(folder, interval, otlp))
        return
    ledger = read_ledger(folder, interval)
    if as_json:
        print_json(ledger_values(folder.location, ledger))
        return
    for number, table in enumerate(make_ledger_views(folder.name, ledger)):
        if number:
            typer.echo()
        print_view(table)


@commands.command(rich_help_panel=PANEL)
def sql(
    runs_and_query: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... QUERY",
            help="One run or several, then a query in quotes, of DuckDB, over trajectories and the data sets.",
        ),
    ],
    scorer: Annotated[
        str,
        typer.Option(metavar="NAME@VERSION", help="Rewards by this scorer; default: each run's own."),
    ] = "",
    limit: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Maximum number of rows of the table; 0: all.")
    ] = 100,
    as_json: AsJson = False,
) -> None:
    """Query stored runs in SQL, such as: select step, avg(reward) from trajectories group by step."""
    import rollmill
    from rollmill.tasks.look.tables.run_frames import view_result
    from rollmill.tasks.look.terminal.output import print_json, print_view

    *runs, query = runs_and_query
    found = rollmill.open_run(*runs, scorer=scorer).sql(query)
    if as_json:
        print_json({"n": len(found), "rows": found.to_dicts()})
    else:
        print_view(view_result(found, limit))


@commands.command(rich_help_panel=PANEL)
def mcp() -> None:
    """Serve runs, read-only, to coding agents: a server of the Model Context Protocol on standard input and output."""
    from rollmill.tasks.look.web.run_tools import make_server
    from rollmill.tasks.store.config import StoreConfig
    from rollmill.tasks.store.run.run_search import find_run

    make_server(find_run, StoreConfig().root).run("stdio")


@commands.command(rich_help_panel=PANEL)
def export(
    run: RunLocation,
    to: Annotated[str, typer.Option("--to", metavar="parquet|jsonl", help="Format of the files.")],
    datasets: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset", metavar="NAME", help="Only this data set; repeatable; default: all that have rows."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="New folder for the files; default: NAME-FORMAT in the working folder."
        ),
    ] = None,
) -> None:
    """Write data sets as Parquet or JSON lines, one file each."""
    from rollmill.tasks.look.export.dataset_export import export_datasets, parse_form
    from rollmill.tasks.look.terminal.output import print_exported_files
    from rollmill.tasks.store.run.run_search import find_run

    form, folder = parse_form(to), find_run(run)
    target = output or Path(f"{folder.name}-{to}")
    print_exported_files(export_datasets(folder, target, form, datasets or ()))


@commands.command(rich_help_panel=PANEL)
def publish(
    runs: RunLocations,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT:PLACE",
            help="delta:PATH, iceberg:PATH, iceberg:CATALOG.NAMESPACE, lance:PATH or huggingface:USER/NAME.",
        ),
    ],
    datasets: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            metavar="NAME",
            help="Only this data set; repeatable; default: rollouts, scores, groups, batches, evaluations, metrics.",
        ),
    ] = None,
) -> None:
    """Append the rows of finished steps to tables of a lakehouse, those that they lack; exit status 1: stored rows were replaced."""
    from rollmill.tasks.look.publish.publication import publish_runs
    from rollmill.tasks.look.terminal.output import print_publication
    from rollmill.tasks.store.run.run_search import distinct_runs, find_run

    published = publish_runs(distinct_runs(map(find_run, runs)), to, datasets or ())
    print_publication(published, to)
    if published.replaced:
        raise typer.Exit(1)


@commands.command(rich_help_panel=PANEL)
def verify(run: RunLocation, as_json: AsJson = False) -> None:
    """Check every byte and row of a run; exit status 1: something is wrong, 2: the run could not be checked."""
    from rollmill.tasks.errors import StoreError, mask_credentials
    from rollmill.tasks.look.tables.view import escape_controls
    from rollmill.tasks.look.terminal.output import verify_and_print
    from rollmill.tasks.store.run.run_search import find_run
    from rollmill.tasks.train.settings_verification import find_wrong_settings

    try:
        is_right = verify_and_print(find_run(run), as_json=as_json, more=[find_wrong_settings])
    except StoreError as error:
        typer.echo(f"rollmill: {escape_controls(mask_credentials(str(error)))}", err=True)
        raise typer.Exit(2) from error
    if not is_right:
        raise typer.Exit(1)
