"""What would shorten a step: held against steps that are played again with the remedy."""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from span_rows import Row, spans_of, whole_step

from rollmill.tasks.look.ledger.balance import measure_balance
from rollmill.tasks.look.ledger.step_attribution import build_ledger
from rollmill.tasks.look.ledger.what_if import LEAST, estimate_savings

SERVER = "http://10.0.0.1:8000"
ENVIRONMENTS, SCORERS = "environments twice as fast", "scorers twice as fast"
SLOTS = "no wait for a server: rollout.max_in_flight, more servers"
WORKERS = "no wait for a scorer: score.workers, score.max_in_flight"
RANKS, EVEN_RANKS = "twice as many ranks, or ranks twice as fast", "rows balanced over ranks, no slow rank"
OVERLAP = "steps that overlap: rollout.max_staleness: 1"
ANOTHER_SERVER = "another server"


def find_savings(*rows: Row, steps: list[int] | None = None) -> dict[str, float]:
    """Seconds by remedy."""
    return {each.remedy: each.seconds for each in estimate_savings(build_ledger(spans_of(*rows), steps))}


@dataclass(frozen=True)
class Played:
    """Trajectories that each have a turn of the environment, generate, and are scored; microseconds."""

    environment: Sequence[int]
    generating: Sequence[int]
    scoring: Sequence[int]
    slots: int
    workers: int

    def rows(self) -> tuple[list[Row], float]:
        """The spans of a step that is nothing else, and how long it takes in seconds."""
        rows, free, played = list[Row](), [0] * self.slots, list[tuple[int, int]]()
        for at, turn in enumerate(self.environment):
            began = heapq.heappop(free)
            if began:
                rows.append((0, "flow", f"{at}.0", "waiting_for_server", 0, began, "slot"))
            sent, ended = began + turn, began + turn + self.generating[at]
            rows.append((0, "flow", f"{at}.0", "environment", began, sent))
            rows.append((0, "flow", f"{at}.0", "generating", sent, ended, SERVER))
            heapq.heappush(free, ended)
            played.append((ended, at))
        workers = [0] * self.workers
        for ended, at in sorted(played):
            began = max(ended, heapq.heappop(workers))
            if began > ended:
                rows.append((0, "flow", f"{at}.0", "waiting_for_scorer", ended, began, "workers"))
            rows.append((0, "flow", f"{at}.0", "scoring", began, began + self.scoring[at]))
            heapq.heappush(workers, began + self.scoring[at])
        end = max(row[5] for row in rows)
        rows += [(0, "flow", "step", "step", 0, end), (0, "flow", "step", "collect", 0, end)]
        return [(*row[:4], row[4] * 1e-6, row[5] * 1e-6, *row[6:]) for row in rows], end * 1e-6

    def remedied(self) -> dict[str, "Played"]:
        """The same with each remedy."""
        n = len(self.environment)
        return {
            ENVIRONMENTS: replace(self, environment=[each // 2 for each in self.environment]),
            SCORERS: replace(self, scoring=[each // 2 for each in self.scoring]),
            SLOTS: replace(self, slots=n),
            WORKERS: replace(self, workers=n),
        }


def some_play(seed: int) -> Played:
    """Between 20 ms and 1 s each, so that nothing ends at the same moment as anything else."""
    rng = random.Random(seed)
    n = rng.randint(2, 10)
    times = [[2 * rng.randrange(10_000, 500_000) for _ in range(n)] for _ in range(3)]
    return Played(*times, slots=rng.randint(1, n), workers=rng.randint(1, n))


@pytest.mark.slow
@given(st.integers(0, 1 << 32).map(some_play))
def test_a_saving_is_the_time_that_the_same_trajectories_save_with_the_remedy(played: Played) -> None:
    rows, whole_s = played.rows()
    savings, least_s = find_savings(*rows), 1.01 * LEAST * whole_s
    is_all_known = {"slot", "workers"} <= {row[6] for row in rows if len(row) > 6}
    for remedy, other in played.remedied().items():
        less_s = max(0.0, whole_s - other.rows()[1])
        assert savings.get(remedy, 0.0) > less_s - least_s
        if is_all_known:  # of what nobody had to wait for nobody knows how much there is
            assert savings.get(remedy, 0.0) == pytest.approx(less_s, abs=least_s)


def make_groups(slot_wait_s: float) -> list[Row]:
    """Two groups of two in two slots: the second group waits for its first slot, and is recorded in Prefect before it begins."""
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 10.2),
        (0, "flow", "step", "collect", 0, 10.2),
        (0, "flow", "collect.0", "planning", 0, 0.1),
        (0, "flow", "0", "collecting", 0.1, 6),
        (0, "flow", "0.0", "generating", 0.1, 5, SERVER),
        (0, "flow", "0.1", "generating", 0.1, 5, SERVER),
        (0, "flow", "1", "environment", 0.1, 0.2),
        (0, "flow", "1", "waiting_for_server", 0.2, 0.2 + slot_wait_s, "slot"),
        (0, "flow", "1", "recording", 0.2 + slot_wait_s, 5.1),
        (0, "flow", "1.0", "generating", 5.1, 9, SERVER),
        (0, "flow", "1.1", "generating", 5.1, 9.5, SERVER),
        (0, "flow", "1", "scoring", 9.5, 10),
        (0, "flow", "1.0", "scoring", 9.6, 9.8),
        (0, "flow", "1.1", "scoring", 9.8, 9.9),
        (0, "flow", "1", "storing", 10, 10.2),
    ]
    return rows


def test_a_groups_wait_for_its_first_slot_is_one_of_its_trajectories() -> None:
    assert find_savings(*make_groups(4.8))[SLOTS] == pytest.approx(4.8)


def test_time_around_the_scores_of_a_groups_trajectories_is_no_scoring() -> None:
    savings = find_savings(*make_groups(4.8))
    assert savings[SCORERS] == pytest.approx(0.15, abs=0.011), "the two scores, one after another, of 0.3 s"


def test_a_groups_scores_wait_for_all_its_trajectories() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 10),
        (0, "flow", "step", "collect", 0, 10),
        (0, "flow", "0.0", "generating", 0, 2, SERVER),
        (0, "flow", "0.1", "environment", 0, 6),
        (0, "flow", "0.0", "scoring", 6, 10),
    ]
    assert find_savings(*rows)[ENVIRONMENTS] == pytest.approx(3.0)
    assert ANOTHER_SERVER not in find_savings(*rows)


def test_a_saving_ends_where_another_trajectory_would_decide() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 10),
        (0, "flow", "step", "collect", 0, 10),
        (0, "flow", "0.0", "generating", 0, 10, SERVER),
        (0, "flow", "0.1", "environment", 0, 9.5),
        (0, SERVER, "main", "generating", 0, 10),
    ]
    savings = find_savings(*rows)
    assert savings[ANOTHER_SERVER] == pytest.approx(0.5)
    assert ENVIRONMENTS not in savings


def test_an_evaluation_that_the_step_waits_for_could_run_concurrently() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 12),
        (0, "flow", "step", "collect", 0, 2),
        (0, "flow", "0.0", "generating", 0, 2, SERVER),
        (0, "flow", "step", "evaluate", 2, 12),
        (0, "flow", "evaluate.1", "evaluating", 2, 12),
        (0, "flow", "v1.0.greedy", "generating", 2, 12, SERVER),
        (0, SERVER, "main", "generating", 0, 12),
    ]
    savings = find_savings(*rows)
    assert savings["evaluation concurrent with steps"] == pytest.approx(10.0)
    assert savings[ANOTHER_SERVER] == pytest.approx(6.0)


def make_training(slow_s: float) -> list[Row]:
    """Four ranks of which the last is slow, and a step that is their training."""
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, slow_s),
        (0, "flow", "step", "train", 0, slow_s),
        (0, "trainer/3", "main", "recomputing", 0, slow_s),
    ]
    for rank in range(3):
        rows.append((0, f"trainer/{rank}", "main", "recomputing", 0, 2))
        rows.append((0, f"trainer/{rank}", "main", "waiting_for_rank", 2, slow_s, "trainer/3"))
    return rows


def test_a_slow_rank_costs_the_time_that_sharing_its_work_would_save() -> None:
    assert find_savings(*make_training(10)) == pytest.approx({EVEN_RANKS: 6.0, RANKS: 5.0})
    assert EVEN_RANKS not in find_savings(*make_training(2))


def test_the_hint_on_sizes_says_when_one_rank_has_more_to_do_than_the_others() -> None:
    generated: Row = (0, SERVER, "main", "generating", 0, 1)
    uneven, even = (
        measure_balance(build_ledger(spans_of(*make_training(10), generated))),
        measure_balance(build_ledger(spans_of(*make_training(2), generated))),
    )
    assert uneven is not None
    assert even is not None
    assert uneven.training_s == pytest.approx(4.0)
    assert uneven.hint.endswith("; the busiest rank works 2.5 times as long as the mean one")
    assert even.hint == "training takes 2.0 times as long as generation: 4 more ranks would make them even"


def two_steps(report_s: float, began: float = 5.0) -> list[Row]:
    """Strictly on-policy: the second step's rollouts begin at `began`, during the first one's report."""
    return [
        (0, "flow", "step", "step", 0, 5 + report_s),
        (0, "flow", "step", "collect", 0, 2),
        (0, "flow", "step", "train", 2, 5),
        (0, "flow", "step", "report", 5, 5 + report_s),
        (0, "flow", "step", "storing", 5, 5 + report_s),
        (1, "flow", "step", "step", 5 + report_s, 10),
        (1, "flow", "step", "collect", 5 + report_s, 7),
        (1, "flow", "step", "train", 7, 10),
        (0, "flow", "0.0", "generating", 0, 2, SERVER),
        (1, "flow", "1.0", "generating", began, 7, SERVER),
        (0, SERVER, "main", "generating", 0, 2),
        (1, SERVER, "main", "generating", began, 7),
        (0, "trainer/0", "main", "forward", 2, 5),
        (1, "trainer/0", "main", "forward", 7, 10),
    ]


def test_work_concurrent_with_rollouts_that_are_awaited_later_saves_nothing() -> None:
    rows = two_steps(report_s=1.0)
    for steps in (None, [0]):
        assert "rows stored at once" not in find_savings(*rows, steps=steps)
        path = build_ledger(spans_of(*rows), steps).path.filter(pl.col("step") == 0)
        last = path.filter(pl.col("end") == path["end"].max())
        assert last["phase", "lane", "name"].row(0) == ("storing", "1.0", "generating")
    assert find_savings(*two_steps(report_s=1.99, began=5.25), steps=[0])[
        "rows stored at once"
    ] == pytest.approx(0.25), "until the rollouts begin, nobody else is known to do anything"


def test_steps_that_do_not_overlap_get_the_remedy_to_overlap() -> None:
    assert find_savings(*two_steps(report_s=0.5))[OVERLAP] == pytest.approx(2.0, abs=0.3)
    assert OVERLAP not in find_savings(*make_staggered_steps())


def make_staggered_steps() -> list[Row]:
    """Two steps with max_staleness 1, and the third one's rollouts during the second's training, to 8.5."""
    return [
        (0, "flow", "step", "step", 0, 5),
        (0, "flow", "step", "collect", 0, 2),
        (0, "flow", "step", "train", 2, 5),
        (1, "flow", "step", "step", 5, 9),
        (1, "flow", "step", "collect", 5, 6),
        (1, "flow", "step", "train", 6, 9),
        (0, "flow", "0.0", "generating", 0, 2, SERVER),
        (1, "flow", "1.0", "generating", 2, 6, SERVER),
        (2, "flow", "2.0", "generating", 6 - 0.001, 8.5, SERVER),
        (0, SERVER, "main", "generating", 0, 8.5),
        (0, "trainer/0", "main", "forward", 2, 5),
        (1, "trainer/0", "main", "forward", 6, 9),
    ]


def test_training_during_rollouts_saves_no_more_than_the_time_until_they_are_waited_for() -> None:
    assert find_savings(*make_staggered_steps(), steps=[1])[RANKS] == pytest.approx(0.5)
    alone = [row for row in make_staggered_steps() if row[0] < 2]
    assert find_savings(*alone, steps=[1])[RANKS] == pytest.approx(1.5)
    assert RANKS not in find_savings(*alone, steps=[0]), (
        "the second step waited for its rollouts, not for this"
    )


def test_all_waits_and_work_of_a_step_are_listed_with_their_seconds() -> None:
    assert find_savings(*whole_step()) == pytest.approx(
        {
            OVERLAP: 4.0,
            ANOTHER_SERVER: 2.5,
            SLOTS: 2.4,
            "no wait for the last trajectories": 2.0,
            RANKS: 1.35,
            EVEN_RANKS: 0.75,
            "rows stored at once": 0.7,
            SCORERS: 0.2,
        }
    )


def test_a_checkpoint_and_weights_that_the_step_waits_for_are_listed() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 10),
        (0, "flow", "step", "sync", 0, 4),
        (0, "trainer/0", "main", "sending", 0, 3),
        (0, SERVER, "weights", "switching", 3, 4),
        (0, "flow", "step", "checkpoint", 4, 6),
        (0, "trainer/0", "main", "checkpointing", 4, 6),
        (0, "flow", "step", "train", 6, 9),
        (0, "trainer/0", "main", "reading_batch", 6, 9),
        (0, "flow", "step", "recording", 9, 10),
    ]
    assert find_savings(*rows) == pytest.approx(
        {
            "weights sent at once": 4.0,
            "batches read at once": 3.0,
            "checkpoints concurrent with steps": 2.0,
            "nothing recorded in Prefect": 1.0,
        }
    )
