"""A server that computes another function of the start model than the trainer is refused before anything is sampled."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.service, pytest.mark.slow]


def test_rope_that_only_the_server_has_ends_the_start_in_bfloat16(workplace: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": "3"}
    overrides = [
        word for name, value in rope.items() for word in (f"--hf-overrides.rope_parameters.{name}", value)
    ]
    settings = ["train.dtype=bfloat16", "serve.dtype=bfloat16", f"serve.extra_args={json.dumps(overrides)}"]
    done = workplace.run("run", "small", *(word for each in settings for word in ("--set", each)))
    assert done.returncode == 2, done.stdout
    assert "nats on average; the limit is 0.1" in done.stdout
    assert "serve.extra_args" in done.stdout
    assert "Traceback" not in done.stdout
    run = Path(workplace.folder, "runs", "small")
    assert not list(run.glob("rollouts/**/*.arrow"))
