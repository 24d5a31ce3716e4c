"""What the groups, the trajectories and the evaluation of each step did, in the attempt that finished it."""

import polars as pl

from tasks.observe.ledger.lanes import CONTAINERS, use_of
from tasks.observe.ledger.timeline import Timeline


def episodes_of(timeline: Timeline) -> pl.DataFrame:
    """The pieces of all lanes of groups, trajectories and evaluations, without the spans around them.

    Returns:
        piece (index into the timeline's), step, use (COLLECTING or EVALUATION), lane, name, cause, start, end
        (microseconds since 1970); by start.
    """
    pieces, spans = timeline.pieces, timeline.spans
    lanes = pl.DataFrame(
        {"lane": [lane for _, lane in timeline.lanes], "use": [use_of(*each) for each in timeline.lanes]},
        {"lane": pl.String, "use": pl.String},
    )
    told = lanes[pieces.lane].hstack(spans["step", "name", "cause", "attempt"][pieces.span])
    told = told.with_columns(
        pl.int_range(pl.len()).alias("piece"), pl.Series("start", pieces.start), pl.Series("end", pieces.end)
    )
    own = told.filter((pl.col("use") != "") & ~pl.col("name").is_in(CONTAINERS))
    last = own.filter(pl.col("attempt") == pl.col("attempt").max().over("step"))
    return last.select("piece", "step", "use", "lane", "name", "cause", "start", "end").sort("start", "end")
