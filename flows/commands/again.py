"""Commands that use what was generated before once more: other rewards, other training, the same steps again."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Again, AsJson, Overrides, RunLocation

PANEL = "Again"
commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def rescore(
    run: RunLocation,
    scorer: Annotated[
        str, typer.Option(help="Registered name, or package.module:attribute; the run's own by default.")
    ] = "",
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B - 1 alone.")] = "",
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Score stored held-out trajectories too.")
    ] = False,
    redo_failed: Annotated[
        bool, typer.Option("--redo-failed", help="Score again what the scorer failed on.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Score a run's stored rollouts with another scorer; what it has scored already is kept."""
    from flows.commands.stored_runs import rescore_config, rescore_here
    from flows.running.folder import existing_run

    folder = existing_run(run)
    config = rescore_config(
        folder, tuple(overrides or ()), scorer, steps, evaluations=evaluations, redo_failed=redo_failed
    )
    rescore_here(folder, config)


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
        typer.Option(min=-1, help="Policy version: one with a checkpoint, 0: the start model; -1: the last."),
    ] = -1,
    name: Annotated[
        str, typer.Option(help="Of a preset: folder of the run below store.root; its own name by default.")
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Evaluate a version of a run's policy, or a model, on held-out prompts; what is evaluated already is kept."""
    from flows.commands.stored_runs import evaluate_config, evaluate_here

    run_name, config = evaluate_config(origin, tuple(overrides or ()), version, name)
    evaluate_here(run_name, config)


@commands.command(rich_help_panel=PANEL)
def retrain(
    origin: Annotated[
        str, typer.Argument(metavar="PRESET|RUN", help="Whose settings to take: a preset's, or a run's.")
    ],
    name: Annotated[str, typer.Option(help="Folder of the new run below store.root.")],
    scores: Annotated[str, typer.Option(metavar="NAME@VERSION", help="Scores to train on.")] = "",
    sources: Annotated[
        list[str] | None, typer.Option("--from", metavar="RUN", help="Run to train from; repeatable.")
    ] = None,
    overrides: Overrides = None,
    again: Again = False,
) -> None:
    """Train a new run from stored rollouts and their scores; an unfinished run of that name is gone on with."""
    from flows.commands.stored_runs import retrain_config, retrain_here

    config = retrain_config(origin, tuple(overrides or ()), sources or (), scores)
    retrain_here(config, name, again=again)


@commands.command(rich_help_panel=PANEL)
def replay(
    run: RunLocation,
    first: Annotated[
        int | None,
        typer.Option("--from", metavar="VERSION", help="Begin here; the last checkpoint but one by default."),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", metavar="VERSION", help="End here; the last checkpoint by default.")
    ] = None,
    attribute: Annotated[
        bool,
        typer.Option(
            "--attribute",
            help="Instead: measure what comes after a step's generation, phase by phase and together.",
        ),
    ] = False,
    step: Annotated[int | None, typer.Option(min=0, help="With --attribute: this step.")] = None,
    traffic: Annotated[
        int,
        typer.Option(
            "--synthetic-traffic",
            metavar="K",
            min=0,
            help="With --attribute: beside K tasks that stand for live generation.",
        ),
    ] = 0,
    trainer: Annotated[
        str, typer.Option(metavar="launch|none", help="With --attribute: none leaves out what needs one.")
    ] = "launch",
    as_json: AsJson = False,
) -> None:
    """Apply a run's stored batches again, and compare with its checkpoint byte for byte; writes nothing to the run.

    With --attribute it says what each phase of a step after its generation takes: seconds, CPU, the event loop's lag, memory.
    """
    from flows.commands.stored_runs import attribute_here, check_replay, replay_here
    from flows.running.folder import existing_run

    check_replay(attribute=attribute, step=step, versions=(first, last), traffic=traffic, as_json=as_json)
    folder = existing_run(run)
    if attribute:
        assert step is not None
        attribute_here(folder, step, traffic, trainer, as_json=as_json)
    else:
        replay_here(folder, first, last)


@commands.command(rich_help_panel=PANEL)
def verify_sync(run: RunLocation, overrides: Overrides = None) -> None:
    """Give a run's servers its weights, and compare every tensor and the live models; exit status 1: something differs.

    The run is locked meanwhile, and nothing of it changes but its incarnation. Another way for the weights: --set
    sync.transport=files, --set sync.mode=second_copy.
    """
    from flows.commands.stored_runs import verify_sync_here
    from flows.running.folder import existing_run

    verify_sync_here(existing_run(run), tuple(overrides or ()))


@commands.command(rich_help_panel=PANEL)
def export_policy(
    run: RunLocation,
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="The new folder.")],
    version: Annotated[
        int | None, typer.Option(help="Policy version with a checkpoint; the last one by default.")
    ] = None,
) -> None:
    """Write a policy version of a run as a Hugging Face folder, with its tokenizer; needs no trainer and no GPU."""
    from flows.policies.exporting import export_policy_here
    from flows.running.folder import existing_run

    typer.echo(export_policy_here(existing_run(run), version, output))
