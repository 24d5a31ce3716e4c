"""The panel "Again" of `rollmill --help`: commands that use stored rollouts, batches and checkpoints again."""

from pathlib import Path
from typing import Annotated

import typer

from rollmill.flows.commands.options import Again, AsJson, Overrides, RunLocation

PANEL = "Again"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def rescore(
    run: RunLocation,
    scorer: Annotated[
        str,
        typer.Option(
            help="Registered name, package.module:attribute, or {name: NAME, args: {ARGUMENT: VALUE}}; default: the run's own."
        ),
    ] = "",
    steps: Annotated[str, typer.Option(metavar="A:B", help="Only steps A to B - 1.")] = "",
    where: Annotated[
        str,
        typer.Option(
            metavar="SQL", help="Condition on the stored groups to score, such as: env = 'addition'."
        ),
    ] = "",
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Score stored held-out trajectories too.")
    ] = False,
    redo_failed: Annotated[
        bool, typer.Option("--redo-failed", help="Score again what the scorer failed on.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Score a run's stored rollouts with another scorer; existing scores are kept."""
    from rollmill.flows.commands.stored_runs import rescore_config, rescore_here
    from rollmill.tasks.store.run.run_search import find_run

    folder = find_run(run)
    config = rescore_config(
        folder,
        tuple(overrides or ()),
        scorer,
        steps,
        where,
        evaluations=evaluations,
        redo_failed=redo_failed,
    )
    rescore_here(folder, config)


@commands.command(rich_help_panel=PANEL)
def annotate(
    run: RunLocation,
    teacher: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model folder, or name on the Hugging Face hub; with --set serve.urls the name that the servers have for it.",
        ),
    ],
    name: Annotated[
        str, typer.Option(help="Name of its log-probabilities; default: the last part of MODEL.")
    ] = "",
    steps: Annotated[str, typer.Option(metavar="A:B", help="Only steps A to B - 1.")] = "",
    where: Annotated[
        str,
        typer.Option(metavar="SQL", help="Condition on the stored groups, such as: env = 'addition'."),
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Store a teacher's log-probabilities of a run's stored rollouts, to distill from; those that are stored are kept."""
    from rollmill.flows.commands.stored_runs import annotate_config, annotate_here
    from rollmill.tasks.store.run.run_search import find_run

    folder = find_run(run)
    annotate_here(folder, annotate_config(folder, tuple(overrides or ()), teacher, name, steps, where))


@commands.command(rich_help_panel=PANEL)
def evaluate(
    origin: Annotated[
        str,
        typer.Argument(
            metavar="RUN|PRESET", help="A run; or a preset, whose model is evaluated as a new run's."
        ),
    ],
    version: Annotated[
        int,
        typer.Option(min=-1, help="Policy version with a checkpoint; 0: the start model; -1: the last."),
    ] = -1,
    name: Annotated[
        str, typer.Option(help="For a preset: folder of the run below store.root; default: its name.")
    ] = "",
    redo_failed: Annotated[
        bool,
        typer.Option("--redo-failed", help="Score the run's held-out answers again whose scorer failed."),
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Evaluate a version of a run's policy, or a model, on held-out prompts; existing results are kept."""
    from rollmill.flows.commands.stored_runs import evaluate_config, evaluate_here

    run_name, config = evaluate_config(origin, tuple(overrides or ()), name)
    evaluate_here(run_name, config, version, redo_failed=redo_failed)


@commands.command(rich_help_panel=PANEL)
def retrain(
    origin: Annotated[
        str, typer.Argument(metavar="PRESET|RUN", help="Where settings come from: a preset, or a run.")
    ],
    name: Annotated[str, typer.Option(help="Folder of the new run below store.root.")],
    scores: Annotated[str, typer.Option(metavar="NAME@VERSION", help="Scores to train on.")] = "",
    sources: Annotated[
        list[str] | None, typer.Option("--from", metavar="RUN", help="Run to train from; repeatable.")
    ] = None,
    where: Annotated[
        str,
        typer.Option(
            metavar="SQL",
            help="Condition on the stored groups to draw from, such as: step < 10 and reward_std > 0.",
        ),
    ] = "",
    order_by: Annotated[
        str, typer.Option(metavar="SQL", help="Order in which they are drawn, such as: reward desc.")
    ] = "",
    weight: Annotated[
        str,
        typer.Option(metavar="SQL", help="Draw them in proportion to this number, such as: reward_std."),
    ] = "",
    overrides: Overrides = None,
    again: Again = False,
) -> None:
    """Train a new run from stored rollouts and their scores; resumes an unfinished run of the same name."""
    from rollmill.flows.commands.new_runs import retrain_here
    from rollmill.flows.commands.stored_runs import retrain_config

    given = {"scores": scores, "where": where, "order_by": order_by, "weight": weight}
    config = retrain_config(origin, tuple(overrides or ()), sources or (), given)
    retrain_here(config, name, again=again)


@commands.command(rich_help_panel=PANEL)
def ab(
    run: RunLocation,
    scorers: Annotated[
        list[str] | None,
        typer.Option(
            "--scorer",
            help="Registered name, package.module:attribute, or {name: NAME, args: {ARGUMENT: VALUE}}; repeatable; one, with "
            "at most one --algorithm, is compared with the run's own.",
        ),
    ] = None,
    algorithms: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm",
            help="Name in conf/algorithms; repeatable; one alone is compared with the run's own.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(help="First part of the names of the new runs; default: the run's name.")
    ] = "",
    where: Annotated[
        str,
        typer.Option(metavar="SQL", help="Condition on the stored groups to train on, such as: step < 10."),
    ] = "",
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Score the rollouts and estimate the gains; train nothing.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=0, help="Number of disagreements to show; 0: of all groups.")
    ] = 10,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare scorers or algorithms on a run's stored rollouts: train a run with each, and evaluate each under every scorer.

    Run the same command again to resume it, or to print the tables again.
    """
    from rollmill.flows.commands.ab_run import ab_here
    from rollmill.flows.offline.ab_arms import AbComparison

    given = (tuple(scorers or ()), tuple(algorithms or ()), name, where, tuple(overrides or ()))
    ab_here(AbComparison(run, *given), only_estimate=only_estimate, limit=limit, as_json=as_json)


@commands.command(rich_help_panel=PANEL)
def replay(
    run: RunLocation,
    first: Annotated[
        int | None,
        typer.Option(
            "--from", metavar="VERSION", help="Start version; default: the last checkpoint but one."
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", metavar="VERSION", help="End version; default: the last checkpoint.")
    ] = None,
    attribute: Annotated[
        bool,
        typer.Option(
            "--attribute", help="Measure the phases after a step's rollouts instead, one by one and together."
        ),
    ] = False,
    step: Annotated[int | None, typer.Option(min=0, help="With --attribute: this step.")] = None,
    traffic: Annotated[
        int,
        typer.Option(
            "--synthetic-traffic",
            metavar="K",
            min=0,
            help="With --attribute: K tasks run concurrently, in place of live generation.",
        ),
    ] = 0,
    trainer: Annotated[
        str,
        typer.Option(
            metavar="launch|none", help="With --attribute: none leaves out the phases that need a trainer."
        ),
    ] = "launch",
    as_json: Annotated[bool, typer.Option("--json", help="With --attribute: print one JSON object.")] = False,
) -> None:
    """Apply a run's stored batches again and compare with its checkpoint byte for byte; writes nothing to the run.

    With --attribute: measure the seconds, CPU, event loop lag and memory of each phase of a step after its rollouts.
    """
    from rollmill.flows.commands.stored_runs import attribute_here, check_replay_options, replay_here
    from rollmill.tasks.store.run.run_search import find_run

    check_replay_options(
        attribute=attribute,
        step=step,
        versions=(first, last),
        traffic=traffic,
        trainer=trainer,
        as_json=as_json,
    )
    folder = find_run(run)
    if attribute:
        assert step is not None
        attribute_here(folder, step, traffic, trainer, as_json=as_json)
    else:
        replay_here(folder, first, last)


@commands.command(rich_help_panel=PANEL)
def verify_sync(run: RunLocation, overrides: Overrides = None) -> None:
    """Send a run's weights to its servers, and compare every tensor and the live models; exit status 1: they differ.

    The run is locked meanwhile; only its epoch and incarnation change. Try another transport or mode with --set
    sync.transport=files, --set sync.mode=second_copy.
    """
    from rollmill.flows.commands.stored_runs import verify_sync_here
    from rollmill.tasks.store.run.run_search import find_run

    verify_sync_here(find_run(run), tuple(overrides or ()))


@commands.command(rich_help_panel=PANEL)
def export_policy(
    run: RunLocation,
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="The new folder.")],
    version: Annotated[
        int | None,
        typer.Option(help="Policy version with a checkpoint, or 0, the start model; default: the last one."),
    ] = None,
) -> None:
    """Write a policy version of a run as a Hugging Face folder, with its tokenizer; needs no trainer and no GPU."""
    from rollmill.flows.policies.policy_export import export_policy_here
    from rollmill.tasks.store.run.run_search import find_run

    typer.echo(export_policy_here(find_run(run), version, output))
