"""The tables of a gate's decision and of an alias' history."""

from collections.abc import Iterable, Sequence

from rollmill.tasks.look.tables.view import Column, View, count_noun
from rollmill.tasks.store.promotion.gate_record import GateRecord
from rollmill.tasks.store.promotion.policy_alias import AliasRecord

_GATE_COLUMNS = (
    Column("env"),
    Column("answers"),
    Column("n", rank=4, header="prompts"),
    Column("production", rank=3),
    Column("candidate", rank=1),
    Column("difference", rank=1),
    Column("low", rank=1, header="at least"),
    Column("pass_rate", rank=2, header="equal passes"),
    Column("passed"),
)
# "2026-11-28 16:42", and "nightly-1/policies/version=000002".
_MINUTES, _SHOWN_PARTS = 16, 3
_HISTORY_COLUMNS = (
    Column("when"),
    Column("action"),
    Column("version"),
    Column("run", rank=2),
    Column("digest", rank=3),
    Column("approved_by", rank=1, header="by"),
    Column("policy"),
    Column("note", rank=4, is_text=True),
)


def make_gate_view(record: GateRecord) -> View:
    """Return the table of a decision: one row for each check."""
    rows = [each.model_dump() | {"passed": "yes" if each.passed else "no"} for each in record.checks]
    values = {"passed": record.passed, **record.model_dump(mode="json")}
    return View(values, _title(record), _GATE_COLUMNS, rows, record.reasons)


def _title(record: GateRecord) -> str:
    against = f"against {record.against.location}" if record.against else "with no policy in production"
    return f"{'passed' if record.passed else 'blocked'}: {record.candidate.location} {against}"


def describe_gate(record: GateRecord) -> Sequence[str]:
    """Return a decision in lines: which policies, each check, the error rate, the reasons."""
    lines = [_title(record)]
    for each in record.checks:
        compared = (
            ""
            if each.difference is None
            else f", {each.production:.3f} in production: difference {each.difference:+.3f}, at least {each.low:+.3f}"
        )
        lines.append(
            f"{each.answers} reward, {each.env}, {count_noun(each.n, 'prompt')}: {each.candidate:.3f}{compared}"
        )
    if record.against:
        lines.append(
            f"a policy that is worse by {record.margin:g} or more passes with a probability of about {record.error_rate:g} at most"
        )
    return [*lines, *record.reasons]


def make_history_view(location: str, records: Iterable[AliasRecord]) -> View:
    """Return the table of an alias' moves, newest first; its values have whole times and paths."""
    moves = list(records)
    rows = [
        {
            "when": each.created_at[:_MINUTES].replace("T", " "),
            "action": each.action,
            "version": each.version,
            "run": each.run,
            "digest": each.digest[:16],
            "approved_by": each.approved_by,
            # The folder of the run, and its policy: a whole path says less on a terminal.
            "policy": "/".join(each.policy.rstrip("/").split("/")[-_SHOWN_PARTS:]),
            "note": each.note,
        }
        for each in moves
    ]
    values = {"alias": location, "moves": [each.model_dump(mode="json") for each in moves]}
    title = f"{location}: {count_noun(len(moves), 'move')}, newest first"
    return View(values, title, _HISTORY_COLUMNS, rows, [] if rows else ["none yet"])
