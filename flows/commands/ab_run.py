"""The command `ab`: runs what is missing of an A/B comparison, and prints its tables."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from rollmill.flows.checks.preflight import preflight_in_turn
from rollmill.flows.commands.flow_process import run_flow
from rollmill.flows.offline.ab_arms import AbComparison
from rollmill.flows.offline.ab_scorers import estimate_arm
from rollmill.flows.offline.retrain_sources import check_source_sampling, check_tokenizers
from rollmill.tasks.look.comparisons.ab_tables import (
    ScoredPolicy,
    make_differences_view,
    make_disagreements_view,
    make_policies_view,
)
from rollmill.tasks.look.tables.view import Column, View
from rollmill.tasks.look.terminal.output import print_json, print_view

ESTIMATE_NOTE = (
    "an estimate from stored rewards alone: what one step towards better answers gains, of the same size for all arms, not what an arm "
    "will reach; effective: trajectories that the weighted ones are worth"
)


def ab_here(compared: AbComparison, *, only_estimate: bool, limit: int, as_json: bool) -> None:
    """Run what is missing of a comparison in this process, and print its tables.

    Args:
        compared: the comparison.
        only_estimate: score the rollouts, print the estimates and the disagreements, and train nothing.
        limit: number of disagreements to print; 0: of all groups.
        as_json: print one JSON object.

    Raises:
        ConfigError, RunMismatchError: it cannot be compared; nothing was started.
    """
    compared.check(trains=not only_estimate)
    is_done = not compared.list_unscored() if only_estimate else compared.is_done
    if is_done:
        views = _make_views(compared, only_estimate=only_estimate, limit=limit)
    else:
        views = _run(compared, only_estimate=only_estimate, limit=limit, prints_json=as_json)
    _print(compared, views, as_json=as_json)


def _run(compared: AbComparison, *, only_estimate: bool, limit: int, prints_json: bool) -> list[View]:
    async def call() -> list[View]:
        from rollmill.flows.ab import ab

        given = (compared.run, compared.scorers, compared.algorithms, compared.name, compared.where)
        await ab(*given, compared.overrides, only_estimate)
        # Here, since the process ends soon after this function.
        return await asyncio.to_thread(_make_views, compared, only_estimate=only_estimate, limit=limit)

    if not only_estimate:
        for arm in compared.arms:
            check_source_sampling(arm.config, arm.config.retrain.sources)
            check_tokenizers(arm.config, arm.config.retrain.sources)
            preflight_in_turn(arm.config, trains=not arm.is_trained, samples=not arm.is_evaluated)
    # The flows print their summaries.
    with redirect_stdout(sys.stderr) if prints_json else nullcontext():
        return run_flow(call, prints_json=prints_json)


def _make_views(compared: AbComparison, *, only_estimate: bool, limit: int) -> list[View]:
    views = [_make_estimates_view(compared)]
    if not only_estimate:
        policies = [ScoredPolicy(*each) for each in compared.list_evaluations()]
        scorers = list(compared.terms)
        views += [
            make_policies_view(policies, scorers, [(arm.label, arm.folder) for arm in compared.arms]),
            make_differences_view(policies, scorers),
        ]
    return [*views, *_list_disagreements(compared, limit)]


def _make_estimates_view(compared: AbComparison) -> View:
    scorers, values, rows = list(compared.terms), [], []
    for arm in compared.arms:
        found = estimate_arm(compared, arm)
        row: dict[str, object] = {
            "arm": arm.label,
            "groups": found.n_trained,
            "n": found.n,
            "effective": round(found.n_effective),
        }
        for scorer, gain, error in zip(scorers, found.gains.tolist(), found.errors.tolist(), strict=True):
            values.append(row | {"scorer": scorer, "gain": gain, "error": error})
            row[scorer] = f"{gain:+z.3f} ± {error:.3f}"
        rows.append(row)
    columns = [
        *(Column("arm"), Column("groups", rank=2, header="groups trained on")),
        *(Column("n", rank=4, header="trajectories"), Column("effective", rank=3)),
        *(Column(scorer, rank=1) for scorer in scorers),
    ]
    title = "estimated gain of each arm under each scorer, with standard errors"
    return View({"estimates": values}, title, columns, rows, [ESTIMATE_NOTE, *compared.list_arguments()])


def _list_disagreements(compared: AbComparison, limit: int) -> list[View]:
    first, *others = compared.terms
    viewer_url = compared.arms[0].config.observe.viewer_url
    return [make_disagreements_view(compared.folder, (first, each), viewer_url, limit) for each in others]


def _print(compared: AbComparison, views: Sequence[View], *, as_json: bool) -> None:
    if not as_json:
        for view in views:
            print_view(view)
        return
    values: dict[str, object] = {"run": compared.folder.location}
    for view in views:
        values |= view.values
    values["disagreements"] = [row for view in views if "disagreements" in view.values for row in view.rows]
    print_json(values)
