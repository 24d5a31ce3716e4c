"""Programs of others play the episodes of runs with the real vLLM and trainer."""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from recording_vllm import NAME, make_recording_python

from rollmill.flows.configuration.presets import PRESETS
from rollmill.tasks.serve.policy_version import PolicyVersion

pytestmark = [pytest.mark.service, pytest.mark.slow]

AGENTS = Path(PRESETS).absolute() / "agents"
COMMANDS = {
    "ask.sh": f"bash {AGENTS / 'ask.sh'}",
    "ask_twice.py": f"{sys.executable} {AGENTS / 'ask_twice.py'}",
    "pydantic_ai_agent.py": f"{sys.executable} {AGENTS / 'pydantic_ai_agent.py'}",
}

SLOW = """
import json, os, sys, time, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages = json.load(sys.stdin)
for again in (True, False):
    asked = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked, headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    messages += [{"role": "user", "content": "+1="}]
    time.sleep(4.0 * again)
"""

Turn = tuple[tuple[int, ...], tuple[int, ...], bytes, tuple[tuple[int, int], ...]]
"""Token ids that were asked with, those that were sampled, the bytes of their log-probabilities, and (index, version) of each span."""


@dataclass(frozen=True)
class Recorded:
    """A run, and each request to vLLM with vLLM's own answer."""

    run: Path
    answers: list[dict[str, Any]]

    def scan(self, dataset: str) -> pl.DataFrame:
        return pl.scan_ipc(self.run / dataset / "**/*.arrow", hive_partitioning=True).collect()

    def check(self) -> pl.DataFrame:
        """Check that every turn in the run's rows is an answer of vLLM, and each answer at most one turn; returns the rows."""
        rows = self.scan("rollouts")
        stored = Counter(turn for row in rows.iter_rows(named=True) for turn in list_turns(row))
        assert stored
        assert stored <= Counter(turn for each in self.answers for turn in read_turns(each))
        return rows


def run_agent(workplace: Any, command: str, **further: object) -> Recorded:
    """Train two steps of 4 groups x 4, with at most 4 programs at a time."""
    recorded = workplace.folder / "recorded.jsonl"
    python = make_recording_python(workplace.vllm_python, workplace.folder / "recording", recorded)
    settings: dict[str, object] = {
        "steps": 2,
        "rollout.environment": "agent",
        "rollout.agent.problems": "addition",
        "rollout.agent.command": command,
        "rollout.groups_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_in_flight": 4,
        "evaluate.every": 0,
        "start_model.steps": 150,
        "serve.python": python,
        "serve.extra_args": f"[--middleware,{NAME}]",
        **further,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    ran = workplace.run("run", "small", *words)
    assert ran.returncode == 0, ran.stdout
    answers = [json.loads(line) for line in recorded.read_text().splitlines()]
    return Recorded(workplace.folder / "runs" / "small", answers)


@pytest.mark.parametrize(
    "agent",
    [
        "ask.sh",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("ask_twice.py", "pydantic_ai_agent.py")),
    ],
)
def test_an_unchanged_program_plays_and_what_vllm_sampled_is_trained_on_bit_for_bit(
    workplace: Any, agent: str
) -> None:
    ran = run_agent(workplace, COMMANDS[agent])
    rows = ran.check()
    assert len(rows) == 32
    played = rows.filter(pl.col("status") == "complete")
    assert len(played) > 16
    for row in played.iter_rows(named=True):
        check_conversation(agent, json.loads(row["messages"]), json.loads(row["outcome"])["output"], row)
    # A step without a group whose rewards differ has an empty batch.
    trained = set(ran.scan("batches")["step"])
    metrics = ran.scan("metrics")
    updated = metrics.filter((pl.col("name") == "train/updated") & (pl.col("value") > 0))
    assert trained
    assert set(updated["step"]) == trained
    differences = metrics.filter(pl.col("name") == "sync/logprob_difference")["value"]
    assert len(differences) >= 2
    assert differences.max() < 1e-4


def test_weights_that_change_between_a_programs_requests_are_exact_spans(workplace: Any) -> None:
    script = workplace.folder / "slow.py"
    script.write_text(SLOW)
    ran = run_agent(workplace, f"{sys.executable} {script}", **{"rollout.max_staleness": 1})
    rows = ran.check()
    both = rows.filter(pl.col("policy_version_first") < pl.col("policy_version_last"))
    assert len(both) > 0
    assert set(both["turns"]) == {2}


def check_conversation(agent: str, messages: list[dict[str, str]], output: str, row: dict[str, Any]) -> None:
    """What a program printed is what the policy said; tokens are characters, and of a text all are there."""
    asked, said, *further = messages
    assert (asked["role"], said["role"]) == ("user", "assistant")
    turns = list_turns(row)
    assert len(asked["content"]) == len(turns[0][0])
    if agent == "ask.sh":
        completion = json.loads(output)
        assert completion["choices"][0]["message"]["content"] == said["content"]
        n_prompt, n_sampled = row["n_prompt_tokens"], row["n_completion_tokens"]
        assert completion["usage"] == {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_sampled,
            "total_tokens": n_prompt + n_sampled,
        }
    elif agent == "ask_twice.py":
        again, last = further
        assert again["content"] == f"\nagain: {asked['content']}"
        assert output.startswith(last["content"])
        assert len(turns) == 2
    else:
        assert output.strip() == messages[-1]["content"].strip()


def list_turns(row: dict[str, Any]) -> list[Turn]:
    """The completions of a row of one segment, and what each continues."""
    ids, logprobs, mask = row["token_ids"], np.array(row["logprobs"], np.float32), np.array(row["loss_mask"])
    assert row["segment_starts"] == [0] or not row["segment_starts"]
    spans = [*zip(row["version_span_starts"], row["version_span_versions"], strict=True)]
    found = [
        (
            tuple(ids[:at]),
            tuple(ids[at : at + n]),
            logprobs[at : at + n].tobytes(),
            tuple((start - at, version) for start, version in spans if at <= start < at + n),
        )
        for at, n in zip(row["turn_starts"], row["turn_tokens"], strict=True)
    ]
    assert mask.sum() == sum(row["turn_tokens"])
    return found


def read_turns(recorded: dict[str, Any]) -> list[Turn]:
    """What a recorded request asked with, and what vLLM answered; none of a request for the probabilities of a prompt."""
    return [
        (
            tuple(recorded["asked"]["token_ids"]),
            tuple(choice["token_ids"]),
            np.array([each["logprob"] for each in choice["logprobs"]["content"]], np.float32).tobytes(),
            tuple(
                (span["start"], PolicyVersion.parse(span["version"]).version)
                for span in choice["weight_versions"]
                if PolicyVersion.is_one(span["version"])
            ),
        )
        # An aborted request has no answer.
        for choice in (recorded["answered"] or {}).get("choices", ())
        if choice["logprobs"]
    ]
