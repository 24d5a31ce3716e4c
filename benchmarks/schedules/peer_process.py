"""A peer on the same work, in a process in its own environment."""

import json

from benchmarks.peers.environment import FILES, environment_of, run
from benchmarks.schedules.latencies import ROLLOUT_SLOTS, SCORING_SLOTS, Latencies
from benchmarks.schedules.timeline import Interval, Timeline

FUSED, TWO_GATHERS = "openpipe-art-0.5.18", "openpipe-art-0.4.11"
"""ART that scores a group once it is complete, and ART that scores when all groups are."""


def measure(peer: str, latencies: Latencies) -> Timeline:
    """What a peer's own pipeline makes of the work.

    Raises:
        PeerError: it failed; with what it said.
    """
    work = {
        "rollouts_s": latencies.rollouts_s,
        "group_scores_s": latencies.group_scores_s,
        "rollout_slots": ROLLOUT_SLOTS,
        "scoring_slots": SCORING_SLOTS,
    }
    said = run([environment_of(peer), "-P", FILES / "art_pipeline.py"], json.dumps(work))
    found = json.loads(said.splitlines()[-1])
    return Timeline(
        found["makespan_s"],
        [Interval(*each) for each in found["rollouts"]],
        [Interval(*each) for each in found["scores"]],
    )
