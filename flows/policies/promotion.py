"""Move a policy to production and back: what the commands and the flow promote do once somebody has approved it."""

import httpx

from rollmill.flows.policies.policy_gate import find_policy, read_intact
from rollmill.tasks.errors import ConfigError, GateError, StoreError, error_text, mask_credentials
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.lineage.policy_lineage import Lineage
from rollmill.tasks.store.promotion.gate_record import GateRecord, read_gate
from rollmill.tasks.store.promotion.policy_alias import AliasRecord, PolicyAlias, now, resolve_policy

WEBHOOK_TIMEOUT_S = 10.0


def find_passed_gate(candidate: str, alias: PolicyAlias) -> GateRecord:
    """Return the decision that a candidate may replace the policy that an alias leads to now.

    Raises:
        ConfigError: the candidate is no exported policy, or is in production already.
        GateError: there is none, or the candidate is blocked; names the reasons.
        StoreError: a file of the candidate is not what was exported.
    """
    policy, current = find_policy("CANDIDATE", candidate), alias.current()
    lineage = read_intact(policy)
    if current and current.policy == policy.absolute:
        raise ConfigError(
            "CANDIDATE", candidate, f"it is in production already: {alias.location} leads to it"
        )
    record = read_gate(alias.root, lineage.digest, current.digest if current else "")
    if record is None:
        compared = f"compared with the policy in production, {current.policy}" if current else "gated"
        raise GateError(
            f"{candidate} was not {compared}: run `rollmill gate {candidate} --to {alias.location}`"
        )
    check_passed(record)
    return record


def check_passed(record: GateRecord) -> None:
    """Raise GateError, with the reasons, if a decision blocks the candidate."""
    if not record.passed:
        raise GateError(f"{record.candidate.location} is blocked: {'; '.join(record.reasons)}")


def promote_policy(candidate: str, alias: PolicyAlias, approved_by: str, note: str = "") -> AliasRecord:
    """Move an alias to a policy that has passed its gate against the one that the alias leads to at that moment.

    Raises:
        GateError, StoreError: as `find_passed_gate`; the alias is as before.
    """
    policy = resolve_policy(candidate)

    def make(previous: str) -> AliasRecord:
        # Here, where no other process moves the alias: it may have moved since the candidate was compared.
        gate = find_passed_gate(candidate, alias)
        record = _describe(policy, read_intact(policy), approved_by, note)
        return record.model_copy(update={"gate": gate, "previous": previous})

    return alias.move(make)


def roll_back(alias: PolicyAlias, approved_by: str, note: str = "") -> AliasRecord:
    """Move an alias back to the policy before its present one; a repeated call goes back further.

    Raises:
        ConfigError: there is no earlier policy.
        StoreError: a file of that policy is not what was exported, or another policy is in its folder now; the alias is as before.
    """

    def make(previous: str) -> AliasRecord:
        key, earlier = alias.earlier()
        policy = RunFolder(earlier.policy)
        record = _describe(policy, read_intact(policy), approved_by, note)
        if record.digest != earlier.digest:
            raise StoreError(
                f"{earlier.policy} has version {record.version} of run {record.run}, and version {earlier.version} of run {earlier.run} was "
                "promoted from there: move that policy back, or gate and promote the one that is there"
            )
        return record.model_copy(update={"action": "rollback", "previous": previous, "restores": key})

    return alias.move(make)


def _describe(policy: RunFolder, lineage: Lineage, approved_by: str, note: str) -> AliasRecord:
    return AliasRecord(
        action="promote",
        policy=policy.absolute,
        digest=lineage.digest,
        run=lineage.run,
        version=lineage.version,
        created_at=now(),
        approved_by=approved_by,
        note=note,
    )


def send_webhook(url: str, alias: PolicyAlias, record: AliasRecord) -> str:
    """Send a move of an alias as JSON by POST; returns why it failed, empty if it did not. The move stays in any case."""
    body = {"alias": alias.location, **record.model_dump(mode="json", exclude={"gate", "format"})}
    try:
        httpx.post(url, json=body, timeout=WEBHOOK_TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return (
            f"the webhook {mask_credentials(url)} failed, and {alias.location} is moved: {error_text(error)}"
        )
    return ""
