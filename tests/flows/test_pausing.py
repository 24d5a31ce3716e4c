"""A wish to pause is kept until the next step, and said once."""

from prefect.states import Suspended

from flows.deploying.automations import shipped
from flows.ui.pausing import Pauses


def test_a_pause_is_due_before_the_next_step_and_not_after_the_last() -> None:
    told: list[bool] = []
    pauses = Pauses(3, lambda: told.append(True))
    assert not pauses.is_due(1)
    pauses.before(1)
    pauses.mark_requested(Suspended())
    pauses.mark_requested(Suspended())
    assert told == [True]
    assert pauses.is_due(2)
    assert not pauses.is_due(3)
    pauses.before(3)


def test_the_automation_waits_for_longer_than_prefects_default_between_two_heartbeats() -> None:
    (automation,) = shipped()
    assert automation.trigger.within.total_seconds() > 180
    assert "prefect.flow-run.heartbeat" in automation.trigger.after & automation.trigger.expect
