"""The flow ab: trains runs from the stored rollouts of one by several scorers or algorithms, and evaluates each under every scorer."""

import asyncio
from collections.abc import Sequence
from functools import partial

from prefect import flow

from rollmill.flows.evaluate import evaluate
from rollmill.flows.failure import one_error
from rollmill.flows.offline.ab_arms import AbComparison
from rollmill.flows.offline.ab_scorers import check_scorer_state
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.rescore import rescore
from rollmill.flows.retrain import retrain


@flow(name="ab", flow_run_name="{run}", persist_result=False, on_cancellation=[mark_cancelled])
async def ab(
    run: str,
    scorers: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    name: str = "",
    where: str = "",
    overrides: Sequence[str] = (),
    only_scores: bool = False,
) -> None:
    """Train an arm for each scorer and algorithm from a run's rollouts, and evaluate each under every scorer.

    Each part is a flow that resumes; what is stored is not done again.

    Args:
        run: location or name of the run whose rollouts are trained on.
        scorers: see `AbComparison`.
        algorithms: see `AbComparison`.
        name: first part of the names of the arms' runs; empty: the run's name.
        where: condition on the groups to train on.
        overrides: key=value, for all arms.
        only_scores: score the rollouts and train nothing.

    Raises:
        ConfigError: a scorer keeps state, or something cannot be compared.
    """
    compared = AbComparison(run, tuple(scorers), tuple(algorithms), name, where, tuple(overrides))
    with one_error():
        await asyncio.to_thread(partial(compared.check, trains=not only_scores))
        for key in compared.terms:
            await check_scorer_state(compared, key)
        for key in await asyncio.to_thread(compared.list_unscored):
            await rescore(compared.folder.name, compared.rescore_config(key))
        if only_scores:
            return
        for arm in compared.arms:
            if not arm.is_trained:
                say(f"training {arm.run_name} from {compared.folder.location} by {arm.label}")
                await retrain(arm.run_name, arm.config)
            if not arm.is_evaluated:
                await evaluate(arm.run_name, arm.config)
        for folder, config in await asyncio.to_thread(compared.find_unscored_evaluations):
            await rescore(folder.name, config)
