"""A scorer that is called in two orders is found to keep state by its rewards."""

from collections.abc import Callable, Sequence

import pytest

from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.order_trial import find_difference, try_orders
from rollmill.tasks.score.terms import resolve_terms
from rollmill.tasks.store.rows import Rows

Groups = Callable[[Sequence[str]], Rows]


async def try_scorer(
    name: str, rollouts: Groups, answers: Sequence[str]
) -> tuple[str, object, object] | None:
    config = ScoreConfig(scorer=f"planted_scorers:{name}", workers=2)
    return (await try_orders(config, [rollouts(answers)], ())).find_difference()


@pytest.mark.slow
async def test_a_scorer_that_counts_its_calls_is_found(rollouts: Groups) -> None:
    assert await try_scorer("Counts", rollouts, ["a", "b", "c"]) == ("r.5.0.0", 1.0, 3.0)


async def test_an_asynchronous_one_that_knows_what_it_has_seen_is_found(rollouts: Groups) -> None:
    assert await try_scorer("Novel", rollouts, ["a", "b", "a"]) == ("r.5.0.0", 1.0, 0.0)


@pytest.mark.slow
async def test_one_whose_rewards_depend_on_the_candidate_is_not_and_failures_do_not_count(
    rollouts: Groups,
) -> None:
    assert await try_scorer("fails_at_times", rollouts, ["a", "raise", "b"]) is None


def test_a_reward_that_differs_in_its_last_bit_is_a_difference() -> None:
    score = {"status": "scored", "reward": 0.3, "subgroup": 0, "turn_rewards": [], "token_rewards": []}
    other = score | {"reward": 0.1 + 0.2}
    nan = score | {"reward": float("nan"), "status": "dropped"}

    assert find_difference({"a": score, "b": nan}, {"a": score, "b": dict(nan), "c": score}) is None
    assert find_difference({"a": score}, {"a": other}) == ("a", 0.3, 0.1 + 0.2)
    assert find_difference({"a": score}, {"a": other | {"status": "failed"}}) is None


@pytest.mark.parametrize(
    ("declared", "expected"), [((), None), ((False,), False), ((False, True), True), ((False, None), None)]
)
def test_a_sum_keeps_state_if_a_part_does(
    declared: tuple[bool | None, ...], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import planted_scorers

    names = ["Counts", "Novel"]
    for name, each in zip(names, declared, strict=False):
        if each is not None:
            monkeypatch.setattr(getattr(planted_scorers, name), "keeps_state", each, raising=False)
    parts = [{"scorer": f"planted_scorers:{name}"} for name in names[: max(1, len(declared))]]

    assert resolve_terms(ScoreConfig.model_validate({"sum": parts})).keeps_state is expected
