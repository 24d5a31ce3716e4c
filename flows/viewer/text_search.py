"""Trajectories whose conversation has a text."""

import json
import time

import polars as pl

from tasks.store.layout import RunFolder
from tasks.store.reader import scan

MOST_FOUND = 1000
LONGEST_S = 5.0
"""A search that has taken this long says how far it came."""


def search(folder: RunFolder, rows: pl.DataFrame, text: str, is_held_out: bool) -> tuple[pl.DataFrame, str]:
    """The rows in whose messages a text is said, upper case or lower, and how far was searched; empty: all of it.

    Steps are read in the order of the rows. A text is looked for in what is stored of a conversation, JSON, so that no
    conversation has to be taken apart; a quotation mark or a letter beyond ASCII is looked for as JSON writes it.
    """
    began, ids, note = time.monotonic(), list[str](), ""
    stored = json.dumps(text)[1:-1].lower()
    has = pl.col("messages").str.to_lowercase().str.contains(stored, literal=True)
    dataset, key = ("evaluations", "version") if is_held_out else ("rollouts", "step")
    steps = rows["step"].unique(maintain_order=True).to_list()
    for at, step in enumerate(steps):
        if len(ids) >= MOST_FOUND or time.monotonic() - began > LONGEST_S:
            note = (
                f"searched {at} of {len(steps)} steps, {steps[at - 1]} the last; give steps to search others"
            )
            break
        messages = scan(folder, dataset, ["trajectory_id", "messages"], **{key: step})
        ids += messages.filter(has).select("trajectory_id").collect()["trajectory_id"].to_list()
    return rows.filter(pl.col("trajectory_id").is_in(ids)), note
