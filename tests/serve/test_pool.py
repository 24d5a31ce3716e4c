"""Which server a request goes to."""

import asyncio
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import ConnectionLostError, TransientRequestError
from rollmill.tasks.serve.server_pool import ServerChange, ServerPool


class Server(NamedTuple):
    """All that the pool knows of a client."""

    url: str
    max_failures_in_a_row: int = 3
    api_key: str = ""

    async def close(self) -> None:
        """Close nothing."""


A, B = Server("http://a"), Server("http://b")


async def pool_of(*servers: Server) -> ServerPool:
    pool = ServerPool()
    for server in servers:
        pool.admit(server)
    return pool


async def test_a_group_goes_to_the_server_with_the_least_outstanding_tokens() -> None:
    pool = await pool_of(A, B)
    async with pool.lease(group=0, n_tokens=100) as first, pool.lease(group=1, n_tokens=10) as second:
        assert {first, second} == {A, B}
        async with pool.lease(group=2, n_tokens=1) as third:
            assert third is second


async def test_a_group_keeps_its_server() -> None:
    pool = await pool_of(A, B)
    async with pool.lease(0, 10) as first:
        pass
    async with pool.lease(1, 5), pool.lease(0, 1000) as again:
        assert again is first


async def test_a_group_chooses_another_server_when_its_own_is_removed() -> None:
    pool = await pool_of(A, B)
    async with pool.lease(0, 10) as first:
        pool.remove(first)
    async with pool.lease(0, 10) as second:
        assert {first, second} == {A, B}


async def test_a_group_moves_with_a_request_that_avoids_its_server() -> None:
    pool = await pool_of(A, B)
    async with pool.lease(0, 10) as first:
        pass
    async with pool.lease(0, 10, avoid={first}) as second, pool.lease(0, 10) as again:
        assert {first, second} == {A, B}
        assert again is second


async def test_a_request_goes_back_to_a_server_that_failed_it_when_there_is_no_other() -> None:
    pool = await pool_of(A)
    async with pool.lease(0, 10, avoid={A}) as server:
        assert server is A


async def test_a_lost_connection_removes_a_server_and_alarms_its_watcher() -> None:
    pool = await pool_of(A, B)
    pool.note_failure(A, ConnectionLostError("refused"))
    assert pool.alarm(A).is_set()
    assert not pool.alarm(B).is_set()
    async with pool.lease(0, 10) as first, pool.lease(1, 10) as second:
        assert {first, second} == {B}


async def test_another_failure_alarms_the_watcher_and_the_server_stays_in_the_pool() -> None:
    pool = await pool_of(A)
    pool.note_failure(A, TransientRequestError("503"))
    assert pool.alarm(A).is_set()
    async with pool.lease(0, 10) as server:
        assert server is A


def fail(pool: ServerPool, server: Server, n_times: int) -> None:
    for _ in range(n_times):
        pool.note_failure(server, TransientRequestError("500"))


async def test_failures_in_a_row_remove_a_server_until_it_is_admitted_again() -> None:
    pool = await pool_of(A, B)
    fail(pool, A, A.max_failures_in_a_row)
    assert pool.is_suspect(A)
    async with pool.lease(0, 10) as first, pool.lease(1, 10) as second:
        assert {first, second} == {B}


async def test_an_answer_ends_a_row_of_failures() -> None:
    pool = await pool_of(A)
    fail(pool, A, A.max_failures_in_a_row - 1)
    pool.note_success(A)
    fail(pool, A, A.max_failures_in_a_row - 1)
    assert not pool.is_suspect(A)
    async with pool.lease(0, 10) as server:
        assert server is A


async def test_a_server_without_an_answer_since_it_was_admitted_is_removed_at_its_next_failure() -> None:
    pool = await pool_of(A, B)
    fail(pool, A, A.max_failures_in_a_row)
    pool.admit(A)
    fail(pool, A, 1)
    async with pool.lease(0, 10) as first, pool.lease(1, 10) as second:
        assert {first, second} == {B}


async def test_metrics_count_from_the_last_call_on() -> None:
    pool = await pool_of(A, B)
    async with pool.lease(0, 30), pool.lease(1, 20), pool.lease(1, 5, avoid={B}):
        pool.remove(A)
        pool.remove(A)
    counted = {metric.name: metric.value for metric in pool.metrics()}
    assert counted == {
        "serve/requests": 3,
        "serve/retries": 1,
        "serve/removals": 1,
        "serve/servers": 1,
        "serve/outstanding_tokens": 55,
    }
    again = {metric.name: metric.value for metric in pool.metrics()}
    assert again == dict.fromkeys(counted, 0) | {"serve/servers": 1}


async def test_a_forgotten_group_chooses_a_server_again() -> None:
    pool = await pool_of(A, B)
    async with pool.lease(0, 10) as first:
        pool.forget(0)
        async with pool.lease(0, 10) as second:
            assert second is not first


async def test_requests_wait_while_there_is_no_server() -> None:
    pool = await pool_of(A)
    pool.remove(A)

    async def asked() -> Server:
        async with pool.lease(0, 1) as server:
            return server

    waiting = asyncio.ensure_future(asked())
    await asyncio.sleep(0)
    assert not waiting.done()
    pool.admit(B)
    assert await asyncio.wait_for(waiting, 5) is B


async def test_earlier_tokens_count_when_a_server_returns() -> None:
    pool = await pool_of(A)
    async with pool.lease(0, 100):
        pool.remove(A)
        pool.admit(A)
        pool.admit(B)
        async with pool.lease(1, 1) as chosen:
            assert chosen is B
    async with pool.lease(2, 1) as first, pool.lease(3, 1) as second:
        assert {first, second} == {A, B}


async def test_a_request_that_fails_gives_its_tokens_back() -> None:
    pool = await pool_of(A, B)
    for group in range(3):
        with pytest.raises(RuntimeError):
            async with pool.lease(group, 100) as server:
                raise RuntimeError
        assert server is A


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 5))
def test_no_server_is_ahead_of_another_by_more_than_one_request(sizes: list[int], n_servers: int) -> None:
    async def load() -> Counter[Server]:
        pool = await pool_of(*(Server(f"http://{n}") for n in range(n_servers)))
        tokens: Counter[Server] = Counter({Server(f"http://{n}"): 0 for n in range(n_servers)})
        leases = [pool.lease(group, size) for group, size in enumerate(sizes)]
        for lease, size in zip(leases, sizes, strict=True):
            tokens[await lease.__aenter__()] += size
        return tokens

    tokens = asyncio.run(load())
    assert max(tokens.values()) - min(tokens.values()) <= max(sizes)


async def test_an_answer_by_unverified_weights_waits_until_they_are_verified() -> None:
    pool = await pool_of(A, B)
    pool.mark_unverified(A, "run:1:2")
    waiting = asyncio.ensure_future(pool.require_verified(A, ["run:1:1", "run:1:2"]))
    await asyncio.sleep(0)
    assert not waiting.done()
    pool.admit(A)
    await waiting


@pytest.mark.parametrize("end", ["remove", "reject"])
async def test_an_answer_by_wrong_weights_is_lost_also_when_it_came_first(end: str) -> None:
    pool = await pool_of(A, B)
    pool.mark_unverified(A, "run:1:2")
    waiting = asyncio.ensure_future(pool.require_verified(A, ["run:1:2"]))
    await asyncio.sleep(0)
    getattr(pool, end)(A)
    for late in (waiting, pool.require_verified(A, ["run:1:2"])):
        with pytest.raises(
            TransientRequestError, match="http://a: its weights run:1:2 could not be verified"
        ):
            await late


async def test_answers_by_other_weights_or_of_other_servers_do_not_wait() -> None:
    pool = await pool_of(A, B)
    pool.mark_unverified(A, "run:1:2")
    await pool.require_verified(A, ["run:1:1"])
    await pool.require_verified(B, ["run:1:2"])


class Mirror:
    """Writes down the changes of a pool."""

    def __init__(self) -> None:
        self.changes: list[ServerChange] = []
        self.n_settled = 0

    def change(self, change: ServerChange) -> None:
        self.changes.append(change)

    async def settle(self) -> None:
        self.n_settled = len(self.changes)


async def test_a_mirror_gets_every_change_in_order() -> None:
    pool = await pool_of(A)
    pool.mirror = mirror = Mirror()
    pool.mark_unverified(A, "v1")
    await pool.settle()
    assert mirror.n_settled == 1
    pool.remove(A)
    await pool.end_requests(A)
    pool.mark_unverified(A, "v1")
    pool.admit(A)
    kinds = [(each.kind, each.version) for each in mirror.changes]
    assert kinds == [
        ("mark_unverified", "v1"),
        ("reject", ""),
        ("remove", ""),
        ("end_requests", ""),
        ("reject", ""),
        ("mark_unverified", "v1"),
        ("admit", ""),
    ]


async def test_the_changes_of_a_pool_make_an_equal_one() -> None:
    pool = await pool_of(A, B)
    pool.mark_unverified(B, "v2")
    assert sorted(pool.changes) == [
        ServerChange("admit", A.url, ""),
        ServerChange("admit", B.url, ""),
        ServerChange("mark_unverified", B.url, "", "v2"),
    ]


async def test_a_server_that_fails_requests_of_another_process_is_removed_and_checked() -> None:
    pool = await pool_of(A, B)
    pool.take_alarm(A.url, is_out=False)
    assert pool.alarm(A).is_set()
    async with pool.lease(0, 1) as chosen:
        assert chosen is A
    pool.take_alarm(A.url, is_out=True)
    assert pool.is_suspect(A)
    async with pool.lease(1, 1) as chosen:
        assert chosen is B
