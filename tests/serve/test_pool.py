"""Which server a request goes to."""

import asyncio
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.serve.pool import ServerPool


class Server(NamedTuple):
    """All that the pool knows of a client."""

    url: str


A, B = Server("http://a"), Server("http://b")


async def pool_of(*servers: Server) -> ServerPool:
    pool = ServerPool()
    for server in servers:
        await pool.admit(server)
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


async def test_a_group_chooses_anew_when_its_server_is_set_aside() -> None:
    pool = await pool_of(A, B)
    async with pool.lease(0, 10) as first:
        pool.set_aside(first)
    async with pool.lease(0, 10) as second:
        assert {first, second} == {A, B}


async def test_groups_choose_anew_when_they_are_forgotten() -> None:
    pool = await pool_of(A, B)
    async with pool.lease(0, 10) as first:
        pool.forget_groups()
        async with pool.lease(0, 10) as second:
            assert second is not first


async def test_requests_wait_while_there_is_no_server() -> None:
    pool = await pool_of(A)
    pool.set_aside(A)

    async def asked() -> Server:
        async with pool.lease(0, 1) as server:
            return server

    waiting = asyncio.ensure_future(asked())
    await asyncio.sleep(0)
    assert not waiting.done()
    await pool.admit(B)
    assert await asyncio.wait_for(waiting, 5) is B


async def test_tokens_of_before_count_when_a_server_is_back() -> None:
    pool = await pool_of(A)
    async with pool.lease(0, 100):
        pool.set_aside(A)
        await pool.admit(A)
        await pool.admit(B)
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
