"""Estimate what would shorten a step, as an upper bound."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from rollmill.tasks.look.ledger.balance import find_overlapping_steps
from rollmill.tasks.look.ledger.dependencies import SLOT, Schedule, Stretch, build_schedule
from rollmill.tasks.look.ledger.span_timeline import COLLECTING, EVALUATION, FLOW, LANES, RANK, STRAGGLERS
from rollmill.tasks.look.ledger.step_attribution import Ledger, median_seconds

COLLECT = ("collect", STRAGGLERS)
"""Phases in which the step lane waits for its rollouts."""
WAITS = {COLLECTING: COLLECT, EVALUATION: ("evaluate",)}
"""Phases in which the step lane waits for other lanes of the flow."""
EPISODE = "|".join(f"^(?:{begins})" for begins in LANES.values())
"""Lanes of the flow that are on the path while the step lane waits."""
TRAINING = ("packing", "forward", "backward", "optimizer", "annotating", "recomputing")
"""Work that is divided among the ranks."""
SENDING = ("gathering", "sending", "receiving", "switching", "sync")
# Number of steps to simulate, spread over the selected ones: savings are medians, so a sample of the steps is enough.
MOST_SCHEDULED = 12
LEAST = 0.01
"""Savings below this share of a step are not reported."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to a run: factors `shares` on the duration of work, by name, and resources whose limit is removed."""

    what: str
    shares: Mapping[str, float] = field(default_factory=dict)
    unlimited: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Saving:
    """How much a remedy can shorten a step.

    Attributes:
        remedy: what is changed, in words.
        seconds: upper bound of what the median step saves; something else may limit it earlier.
    """

    remedy: str
    seconds: float


def list_remedies(n_servers: int) -> list[Remedy]:
    """List the remedies to estimate; with one more server generation takes n_servers / (n_servers + 1) of its time."""
    twice, none = 0.5, 0.0
    return [
        Remedy("another server", {"generating": n_servers / (n_servers + 1)}),
        Remedy(
            "no wait for a server: rollout.max_in_flight, more servers", {"waiting_for_server": none}, [SLOT]
        ),
        Remedy("environments twice as fast", {"environment": twice}),
        Remedy("scorers twice as fast", {"scoring": twice}),
        Remedy("no wait for a scorer: score.workers, score.max_in_flight", unlimited=["workers", "calls"]),
        Remedy("twice as many ranks, or ranks twice as fast", dict.fromkeys(TRAINING, twice)),
        Remedy("weights sent at once", dict.fromkeys(SENDING, none)),
        Remedy("rows stored at once", {"storing": none}),
        Remedy("batches read at once", {"reading_batch": none}),
        Remedy("nothing recorded in Prefect", {"recording": none}),
    ]


def estimate_savings(ledger: Ledger) -> list[Saving]:
    """Estimate how much each remedy would shorten the median step, largest first; savings below 1 % are left out."""
    steps = ledger.steps.gather_every(max(1, -(-len(ledger.steps) // MOST_SCHEDULED)))
    path = ledger.path.join(steps, on="step", how="semi")
    line = path.filter((pl.col("process") != FLOW) | ~pl.col("lane").str.contains(EPISODE))
    room = _room(ledger)
    rollouts = [each for step in steps["step"] for each in _schedule_rollouts(ledger, path, step)]
    n_servers = max(ledger.there["n_servers"].to_list(), default=0)
    saved = {each.what: _estimate_saving(each, line, room, rollouts) for each in list_remedies(n_servers)}
    saved["rows balanced over ranks, no slow rank"] = _limit_to_room(_balance_saving(ledger, line), room)
    saved["evaluation concurrent with steps"] = _phase_us(path, WAITS[EVALUATION])
    saved["checkpoints concurrent with steps"] = _limit_to_room(_phase_us(line, ["checkpoint"]), room)
    saved["no wait for the last trajectories"] = _phase_us(path, [STRAGGLERS])
    if find_overlapping_steps(ledger).is_empty():
        saved["steps that overlap: rollout.max_staleness: 1"] = _overlap_saving(path, line)
    found = []
    for what, each in saved.items():
        # A step in which the remedy changes nothing has no row; it counts as 0.
        us = steps.select("step").join(each, on="step", how="left").select(us=pl.col("saved").fill_null(0))
        found.append(Saving(what, median_seconds(us)))
    least_s = LEAST * median_seconds(steps)
    return sorted((each for each in found if each.seconds > least_s), key=lambda each: -each.seconds)


@dataclass(frozen=True, slots=True)
class _Rollouts:
    """A step's rollouts, or an evaluation, that the flow's step lane waits for, as a schedule to simulate.

    Attributes:
        waited_us: microseconds that the step lane waited.
        length_us: length of the recorded schedule.
    """

    step: int
    schedule: Schedule
    waited_us: int
    length_us: int

    def saving_us(self, remedy: Remedy) -> int:
        """Return by how many microseconds a remedy shortens the wait; 0 if that is too little to report."""
        # Most remedies do not concern the rollouts; the sum of the work they shorten shows it without a simulation.
        if self.schedule.places.isdisjoint(remedy.unlimited) and (
            self.schedule.less_us(remedy.shares) < LEAST * self.length_us
        ):
            return 0
        # The step lane may have waited for a part of the schedule alone, and then no more can be saved.
        less_us = self.length_us - self.schedule.length_us(remedy.shares, remedy.unlimited)
        return max(0, min(self.waited_us, less_us))


def _schedule_rollouts(ledger: Ledger, path: pl.DataFrame, step: int) -> list[_Rollouts]:
    own, found = ledger.episodes.filter(pl.col("step") == step), []
    for use, phases in WAITS.items():
        waited_us = int(_phase_us(path.filter(pl.col("step") == step), phases)["saved"].sum())
        if waited_us:
            rows = own.filter(pl.col("use") == use).select(Stretch._fields).iter_rows()
            schedule = build_schedule(Stretch(*row) for row in rows)
            found.append(_Rollouts(step, schedule, waited_us, schedule.length_us({})))
    return found


def _length() -> pl.Expr:
    return pl.col("end") - pl.col("start")


def _estimate_saving(
    remedy: Remedy, line: pl.DataFrame, room: pl.DataFrame, rollouts: Sequence[_Rollouts]
) -> pl.DataFrame:
    """Return columns step, saved (microseconds): rollouts by simulation, other work by its time on the critical path."""
    kept = pl.col("name").replace_strict(remedy.shares, default=1.0, return_dtype=pl.Float64)
    gone = line.group_by("step").agg((_length() * (1 - kept)).sum().alias("saved"))
    sooner = {
        "step": [each.step for each in rollouts],
        "saved": [each.saving_us(remedy) for each in rollouts],
    }
    concurrent = pl.DataFrame(sooner, {"step": line.schema["step"], "saved": pl.Float64})
    both = pl.concat([_limit_to_room(gone, room), concurrent])
    return both.group_by("step").agg(pl.col("saved").sum())


def _room(ledger: Ledger) -> pl.DataFrame:
    """Return columns step, room: microseconds by which a step may shorten before it waits for the next one's rollouts."""
    ended = (
        ledger.episodes.filter(pl.col("use") == COLLECTING)
        # What a step may be shortened to is when the rollouts of the next one end.
        .group_by(pl.col("step") - 1)
        .agg(pl.col("end").max())
    )
    ends = ledger.path.group_by("step").agg(pl.col("end").max())
    return (
        ends.join(ended, on="step", suffix="_next")
        .join(find_overlapping_steps(ledger), on="step", how="semi")
        .select("step", room=(pl.col("end") - pl.col("end_next")).clip(lower_bound=0))
    )


def _limit_to_room(saved: pl.DataFrame, room: pl.DataFrame) -> pl.DataFrame:
    """Return columns step, saved (microseconds), where a step's saving is at most its `room` (see `_room`), if it has one."""
    # A step that overlaps no other has no room here, and `min_horizontal` leaves out what is null.
    both = saved.join(room, on="step", how="left")
    return both.select("step", pl.min_horizontal("saved", "room").cast(pl.Float64).alias("saved"))


def _phase_us(path: pl.DataFrame, phases: Sequence[str]) -> pl.DataFrame:
    """Return columns step, saved: microseconds of the critical path while the step lane was in these phases."""
    return path.filter(pl.col("phase").is_in(phases)).group_by("step").agg(_length().sum().alias("saved"))


def _balance_saving(ledger: Ledger, line: pl.DataFrame) -> pl.DataFrame:
    """Return columns step, saved: mean microseconds that ranks wait for slower ones, at most those of training."""
    ranks = ledger.owners.filter(pl.col("process").str.starts_with(RANK))
    waits = pl.col("us").filter(pl.col("name") == "waiting_for_rank").sum() / pl.col("process").n_unique()
    mean = ranks.group_by("step").agg(waits.alias("mean"))
    return (
        _phase_us(line, ["train"])
        .join(mean, on="step")
        .select("step", pl.min_horizontal("saved", "mean").alias("saved"))
    )


def _overlap_saving(path: pl.DataFrame, line: pl.DataFrame) -> pl.DataFrame:
    """Return columns step, saved: microseconds of generation or of all other work, whichever is shorter."""
    others = line.filter(~pl.col("phase").is_in(COLLECT)).group_by("step").agg(rest=_length().sum())
    both = _phase_us(path, COLLECT).join(others, on="step")
    return both.select("step", saved=pl.min_horizontal("saved", "rest"))
