"""Routed experts from arrays to shards and back."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import ShardError, StoreError
from rollmill.tasks.store.expert_routing import (
    list_expired_routing,
    make_routing_row,
    read_routing,
    select_expired_steps,
)
from rollmill.tasks.store.filesystem import LocalFiles, open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.shards.writer import RunWriter, commit_rows


def experts(n_tokens: int, seed: int = 0, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (n_tokens, 3, 2)).astype(dtype)


async def stored(folder: RunFolder, rows: dict[str, list[np.ndarray]], step: int = 0, epoch: int = 1) -> None:
    async with RunWriter(open_files(folder), epoch, 0.0) as writer:
        for trajectory, parts in rows.items():
            await writer.append("routing", make_routing_row("run", step, trajectory, parts), step=step)


async def test_experts_are_read_back_as_equal_views_on_the_shard(folder: RunFolder) -> None:
    large, wide = experts(1 << 20), experts(5, 1, np.uint16)
    await stored(folder, {"a": [large], "b": [wide]})
    before = pa.total_allocated_bytes()
    got = read_routing(folder, 0, ["b", "a"])
    if folder.is_local:
        assert pa.total_allocated_bytes() - before < large.nbytes / 10
    assert [each.dtype for each in got] == [np.uint16, np.uint8]
    np.testing.assert_array_equal(got[0], wide)
    np.testing.assert_array_equal(got[1], large)


def test_a_row_of_one_turn_is_a_view_on_what_was_received() -> None:
    given = experts(100)
    row = make_routing_row("run", 0, "a", [given])
    assert np.shares_memory(np.frombuffer(row.column("experts").buffers()[2], np.uint8), given)


@pytest.mark.parametrize("kind", ["<u2", ">u2"])
async def test_experts_are_read_back_equal_from_any_order_of_axes_and_bytes(
    folder: RunFolder, kind: str
) -> None:
    whole = experts(6).astype(kind)
    given = {"a": [np.asfortranarray(whole)], "b": [np.asfortranarray(whole[:2]), whole[2:]], "c": [whole]}
    await stored(folder, given)
    for got in read_routing(folder, 0, [*given]):
        assert got.dtype == np.uint16
        np.testing.assert_array_equal(got, whole)


async def test_the_turns_of_an_episode_are_one_row(folder: RunFolder) -> None:
    whole = experts(10)
    await stored(folder, {"a": [whole[:4], whole[4:4], whole[4:]]})
    np.testing.assert_array_equal(read_routing(folder, 0, ["a"])[0], whole)


async def test_of_a_trajectory_that_was_sampled_again_the_last_experts_count(folder: RunFolder) -> None:
    await stored(folder, {"a": [experts(4, 0)]})
    await stored(folder, {"a": [experts(6, 1)]}, epoch=2)
    np.testing.assert_array_equal(read_routing(folder, 0, ["a"])[0], experts(6, 1))


async def test_missing_experts_are_named(folder: RunFolder) -> None:
    await stored(folder, {"a": [experts(4)]})
    with pytest.raises(ShardError, match=r"1 of 2 trajectories; missing are b: is rollout\.keep_routing on"):
        read_routing(folder, 0, ["a", "b"])


def test_a_rollout_whose_experts_cannot_be_stored_is_not_stored(tmp_path: Path, rows) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.tmp.mkdir(parents=True)

    class FullOfBulk(LocalFiles):
        def publish(self, folder: str, write: Callable[[Path], str]) -> str:
            if folder.startswith("routing"):
                raise StoreError("no space left")
            return super().publish(folder, write)

    gathered = {
        "rollouts/step=000000": [rows("rollouts", step=0)],
        "rollouts/step=000001": [rows("rollouts", step=1)],
        "routing/step=000000": [make_routing_row("run", 0, "a", [experts(4)])],
    }
    failed, _ = commit_rows(FullOfBulk(Path(folder.location), folder.tmp), 1, 0, gathered)
    assert set(failed) == {"rollouts/step=000000", "routing/step=000000"}
    assert read(folder, "rollouts").num_rows == 1


@given(
    stored=st.sets(st.integers(0, 30)),
    done=st.integers(0, 30),
    checkpoint=st.integers(0, 30),
    keep=st.integers(0, 30),
)
def test_steps_that_a_resumed_run_trains_again_and_the_last_steps_never_expire(
    stored: set[int], done: int, checkpoint: int, keep: int
) -> None:
    expired = set(select_expired_steps(sorted(stored), done=done, checkpoint=checkpoint, keep=keep))
    assert not {step for step in expired if step >= checkpoint or step >= done - keep}
    kept = {step for step in stored - expired if step < checkpoint}
    assert len(kept & set(range(done))) <= keep or not keep


async def test_old_experts_are_removed_and_newer_ones_stay(folder: RunFolder) -> None:
    for step in range(4):
        await stored(folder, {f"{step}": [experts(4)]}, step, epoch=step + 1)
    gone = list_expired_routing(open_files(folder), done=4, checkpoint=3, keep=2)
    open_files(folder).remove(gone)
    assert [key.split("/")[1] for key in gone] == ["step=000000", "step=000001"]
    assert read(folder, "routing")["step"].to_pylist() == [2, 3]
