"""What would shorten a step, and by how much at most."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from tasks.observe.ledger.attribution import Ledger, median_s
from tasks.observe.ledger.balance import overlapping_steps
from tasks.observe.ledger.lanes import COLLECTING, EVALUATION, LANES, STRAGGLERS
from tasks.observe.ledger.precedence import SLOT, Stretch, schedule_of
from tasks.observe.ledger.schedule import Schedule
from tasks.observe.ledger.timeline import FLOW, RANK

COLLECT = ("collect", STRAGGLERS)
"""Phases of the step's line in which it waits for its rollouts."""
WAITS = {COLLECTING: COLLECT, EVALUATION: ("evaluate",)}
"""Phases of the step's line in which it waits for what goes on in lanes of the flow."""
EPISODE = "|".join(f"^(?:{begins})" for begins in LANES.values())
"""Lanes of the flow that the path is in while the step's line waits, or before it did."""
TRAINING = ("packing", "forward", "backward", "optimizer", "annotating", "recomputing")
"""What ranks share between them."""
SENDING = ("gathering", "sending", "receiving", "switching", "sync")
MOST_SCHEDULED = 12
"""Steps whose rollouts are scheduled anew, spread over those that are looked at; savings are medians of these."""
LEAST = 0.01
"""Share of a step below which a saving is not told."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that makes a part of the work shorter, or waits for places needless.

    Attributes:
        what: in words.
        shares: of its time that work of a name keeps.
        unlimited: places that nobody waits for any more.
    """

    what: str
    shares: Mapping[str, float] = field(default_factory=dict)
    unlimited: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Saving:
    """What a remedy saves.

    Attributes:
        remedy: its words.
        seconds: that the median step is shorter by, at most: never more than until something else decides its length.
    """

    remedy: str
    seconds: float


def remedies(n_servers: int) -> list[Remedy]:
    """What may be tried, given how many servers there are."""
    twice, none = 0.5, 0.0
    return [
        Remedy("another server", {"generating": n_servers / (n_servers + 1)}),
        Remedy(
            "no wait for a server: rollout.max_in_flight, more servers", {"waiting_for_server": none}, [SLOT]
        ),
        Remedy("environments twice as fast", {"environment": twice}),
        Remedy("scorers twice as fast", {"scoring": twice}),
        Remedy("no wait for a scorer: score.workers, score.max_in_flight", unlimited=["workers", "calls"]),
        Remedy("twice as many ranks, or as fast ones", dict.fromkeys(TRAINING, twice)),
        Remedy("weights sent in no time", dict.fromkeys(SENDING, none)),
        Remedy("rows stored in no time", {"storing": none}),
        Remedy("batches handed over in no time", {"handing_over": none}),
        Remedy("nothing told to Prefect", {"recording": none}),
    ]


def savings(ledger: Ledger) -> list[Saving]:
    """What would shorten the median step, the best first; nothing that saves less than a hundredth of it."""
    steps = ledger.steps.gather_every(max(1, -(-len(ledger.steps) // MOST_SCHEDULED)))
    path = ledger.path.join(steps, on="step", how="semi")
    line = path.filter((pl.col("process") != FLOW) | ~pl.col("lane").str.contains(EPISODE))
    room = _room(ledger)
    rollouts = [each for step in steps["step"] for each in _rollouts(ledger, path, step)]
    n_servers = max(ledger.there["n_servers"].to_list(), default=0)
    saved = {each.what: _saved(each, line, room, rollouts) for each in remedies(n_servers)}
    saved["rows balanced over ranks, no slow one"] = _within(_balanced(ledger, line), room)
    saved["evaluation beside the steps"] = _in_phases(path, WAITS[EVALUATION])
    saved["checkpoints beside the steps"] = _within(_in_phases(line, ["checkpoint"]), room)
    saved["no wait for the last trajectories"] = _in_phases(path, [STRAGGLERS])
    if overlapping_steps(ledger).is_empty():
        saved["steps that overlap: rollout.max_staleness: 1"] = _overlapping(path, line)
    found = [Saving(what, _median_s(steps, each)) for what, each in saved.items()]
    least_s = LEAST * median_s(steps)
    return sorted((each for each in found if each.seconds > least_s), key=lambda each: -each.seconds)


@dataclass(frozen=True, slots=True)
class _Rollouts:
    """What a step waits for in lanes of the flow: its own rollouts, or an evaluation.

    Attributes:
        waited_us: that the step's line waited.
        length_us: of the schedule as it was.
    """

    step: int
    schedule: Schedule
    waited_us: int
    length_us: int

    def saved_us(self, remedy: Remedy) -> int:
        """What the line waits less; 0 where that is too little to be told."""
        if self.schedule.places.isdisjoint(remedy.unlimited) and (
            self.schedule.less_us(remedy.shares) < LEAST * self.length_us
        ):
            return 0
        less_us = self.length_us - self.schedule.length_us(remedy.shares, remedy.unlimited)
        return max(0, min(self.waited_us, less_us))


def _rollouts(ledger: Ledger, path: pl.DataFrame, step: int) -> list[_Rollouts]:
    own, found = ledger.episodes.filter(pl.col("step") == step), []
    for use, phases in WAITS.items():
        waited_us = int(_in_phases(path.filter(pl.col("step") == step), phases)["saved"].sum())
        if waited_us:
            rows = own.filter(pl.col("use") == use).select(Stretch._fields).iter_rows()
            schedule = schedule_of(Stretch(*row) for row in rows)
            found.append(_Rollouts(step, schedule, waited_us, schedule.length_us({})))
    return found


def _length() -> pl.Expr:
    return pl.col("end") - pl.col("start")


def _median_s(steps: pl.DataFrame, saved: pl.DataFrame) -> float:
    """Seconds: the median over the steps of what is saved (step, saved in microseconds); nothing where it has no row."""
    return median_s(
        steps.select("step").join(saved, on="step", how="left").select(us=pl.col("saved").fill_null(0))
    )


def _saved(
    remedy: Remedy, line: pl.DataFrame, room: pl.DataFrame, rollouts: Sequence[_Rollouts]
) -> pl.DataFrame:
    """step, saved: of rollouts what a new schedule says, of everything else its share of the path."""
    kept = pl.col("name").replace_strict(remedy.shares, default=1.0, return_dtype=pl.Float64)
    gone = line.group_by("step").agg((_length() * (1 - kept)).sum().alias("saved"))
    sooner = {"step": [each.step for each in rollouts], "saved": [each.saved_us(remedy) for each in rollouts]}
    beside = pl.DataFrame(sooner, {"step": line.schema["step"], "saved": pl.Float64})
    both = pl.concat([_within(gone, room), beside])
    return both.group_by("step").agg(pl.col("saved").sum())


def _room(ledger: Ledger) -> pl.DataFrame:
    """step, room: what it may be shorter by until the next one's rollouts, which go on beside it, would be waited for."""
    ended = (
        ledger.episodes.filter(pl.col("use") == COLLECTING)
        .group_by(pl.col("step") - 1)
        .agg(pl.col("end").max())
    )
    ends = ledger.path.group_by("step").agg(pl.col("end").max())
    beside = overlapping_steps(ledger)
    return (
        ends.join(ended, on="step", suffix="_next")
        .join(beside, on="step", how="semi")
        .select("step", room=(pl.col("end") - pl.col("end_next")).clip(lower_bound=0))
    )


def _within(saved: pl.DataFrame, room: pl.DataFrame) -> pl.DataFrame:
    """step, saved: no more than there is room for."""
    both = saved.join(room, on="step", how="left")
    return both.select("step", pl.min_horizontal("saved", "room").cast(pl.Float64).alias("saved"))


def _in_phases(path: pl.DataFrame, phases: Sequence[str]) -> pl.DataFrame:
    """step, saved: all of the path in these phases of the step's line."""
    return path.filter(pl.col("phase").is_in(phases)).group_by("step").agg(_length().sum().alias("saved"))


def _balanced(ledger: Ledger, line: pl.DataFrame) -> pl.DataFrame:
    """step, saved: what a rank waits for slower ones in the mean, which all would be done sooner by if work were even."""
    ranks = ledger.owners.filter(pl.col("process").str.starts_with(RANK))
    waits = pl.col("us").filter(pl.col("name") == "waiting_for_rank").sum() / pl.col("process").n_unique()
    mean = ranks.group_by("step").agg(waits.alias("mean"))
    return (
        _in_phases(line, ["train"])
        .join(mean, on="step")
        .select("step", pl.min_horizontal("saved", "mean").alias("saved"))
    )


def _overlapping(path: pl.DataFrame, line: pl.DataFrame) -> pl.DataFrame:
    """step, saved: the shorter one of generating and of everything else, once they go on beside each other."""
    both = _in_phases(path, COLLECT).join(
        line.filter(~pl.col("phase").is_in(COLLECT)).group_by("step").agg(_length().sum().alias("rest")),
        on="step",
    )
    return both.select("step", saved=pl.min_horizontal("saved", "rest"))
