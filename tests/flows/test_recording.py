"""A run waits for Prefect's server when that helps, and never for ever."""

from datetime import datetime

import httpx

from rollmill.flows.prefect_integration.recording import Recording


class Server:
    """Has recorded one count after the other each time it is asked, and the last one from then on."""

    def __init__(self, *counts: int | Exception) -> None:
        self.counts = list(counts)
        self.n_asked = 0

    async def count(self, since: datetime) -> int:
        self.n_asked += 1
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        if isinstance(count, Exception):
            raise count
        return count


def start_recording(server: Server, **settings: float) -> tuple[Recording, list[str]]:
    """Return a recording of ten started task runs, of which four may be unrecorded, and its messages."""
    messages: list[str] = []
    made = Recording(server.count, messages.append, **{"max_unrecorded": 4, **settings})  # type: ignore[arg-type]
    for _ in range(10):
        made.count_start()
    return made, messages


async def test_the_server_is_not_asked_far_from_the_limit() -> None:
    server = Server(0)
    made, _ = start_recording(server, max_unrecorded=10)
    for _ in range(100):
        await made.hold_back()
    assert server.n_asked == 0


async def test_rollouts_are_held_back_until_enough_is_recorded() -> None:
    server = Server(0, 5, 6)
    made, messages = start_recording(server)
    await made.hold_back()
    assert (server.n_asked, messages) == (3, [])
    await made.hold_back()
    assert server.n_asked == 3


async def test_a_server_that_stops_recording_is_reported_once_and_the_run_continues() -> None:
    server = Server(3)
    made, messages = start_recording(server, hold_back_timeout_s=0.0)
    await made.hold_back()
    await made.hold_back()
    assert server.n_asked == 2
    (line,) = messages
    assert "3 of 10 task runs" in line
    assert "no more within 0 s" in line


async def test_a_server_that_is_gone_is_reported_with_the_reason_and_the_run_continues() -> None:
    made, messages = start_recording(
        Server(httpx.ConnectError("connection refused")), hold_back_timeout_s=0.0
    )
    await made.hold_back()
    (line,) = messages
    assert "ConnectError: connection refused" in line


async def test_the_end_waits_until_all_is_recorded() -> None:
    made, _ = start_recording(Server(4, 9, 10))
    assert await made.wait_until_recorded() == 0


async def test_the_end_waits_no_longer_than_allowed() -> None:
    made, _ = start_recording(Server(9), record_timeout_s=0.0)
    assert await made.wait_until_recorded() == 1


async def test_the_end_asks_a_server_again_that_failed_to_answer() -> None:
    made, _ = start_recording(Server(httpx.ConnectError("connection refused"), 10))
    assert await made.wait_until_recorded() == 0


async def test_the_end_waits_no_longer_than_allowed_for_a_server_that_is_gone() -> None:
    made, _ = start_recording(Server(httpx.ConnectError("connection refused")), record_timeout_s=0.1)
    assert await made.wait_until_recorded() == 10
