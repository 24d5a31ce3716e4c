"""Messages between ranks arrive as they were sent, and what another program sends is refused and not executed."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

FLOATS = np.ones(3, np.float32).tobytes()

# Where {row: [T] float32} is expected.
PLANTED = {
    "text": "hello",
    "text as values": {0: "hello"},
    "other dtype": {0: ["<f8", [3], np.ones(3).tobytes()]},
    "objects": {0: ["|O", [3], FLOATS]},
    "other size": {0: ["<f4", [2], FLOATS]},
    "endless shape": {0: ["<f4", [2**40, 2**40], FLOATS]},
    "no parts": {0: []},
}


@pytest.mark.service
def test_messages_of_ranks_arrive_as_they_were_sent_and_foreign_ones_are_refused(
    run_ranks: Callable[[str, int, dict[str, object]], None], tmp_path: Path
) -> None:
    planted = {name: msgspec.msgpack.encode(each).hex() for name, each in PLANTED.items()}
    planted |= {"cut": msgspec.msgpack.encode({0: ["<f4", [3], FLOATS]})[:-1].hex()}
    planted |= {"deep": (b"\x81\x00" + b"\x91" * 100_000).hex(), "longer": b"\x80\x80".hex()}
    run_ranks("message_ranks.py", 2, {"folder": str(tmp_path), "planted": planted})
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))

    both = {"all_gathered": [True, True], "writable": True, "results": True}
    assert first["records"] == {**both, "gathered": [True, True], "failed": "rank 1: no room ?"}
    assert second["records"] == {**both, "gathered": [], "failed": "[]"}

    assert first["planted"].keys() == {*planted, "pickle", "size"}
    for name, error in first["planted"].items():
        assert error.startswith(
            "rank 1 announces" if name == "size" else "rank 1 sent no message of type dict"
        ), (name, error)
        assert "docs/explanation/security.md" in error, name
    assert not (tmp_path / "executed-0").exists()
