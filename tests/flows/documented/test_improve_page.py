"""The tutorial on improving a policy from its logs, on real vLLM servers: each command, some of them killed at random moments before."""

import json
import logging
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_scene import Scene, finish_flow_runs

from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.verify.run_verification import verify_run
from tests.documentation.page_commands import ROOT, Command, commands_run_by

pytestmark = [pytest.mark.service, pytest.mark.long]
logger = logging.getLogger(__name__)
KILLS = 5
LATEST_S = {"rollmill improve": 30.0, "rollmill retrain": 20.0, "rollmill import": 4.0}
"""By the first words of a command that is killed: up to how many seconds after its start."""
PAGE = (ROOT / "docs" / "tutorials" / "improve.md").read_text()


def draw_kills(seed: int) -> dict[Command, list[float]]:
    """The moments at which commands are killed, in seconds after their start."""
    draw, kills = random.Random(seed), defaultdict[Command, list[float]](list)
    commands = [each for each in commands_run_by(__file__) if first_words(each) in LATEST_S]
    for command in draw.choices(commands, k=KILLS):
        kills[command].append(draw.uniform(0.5, LATEST_S[first_words(command)]))
    return kills


def first_words(command: Command) -> str:
    return " ".join(command.text.split()[:2])


def write_answers(path: Path) -> None:
    """A log of 24 sums and four answers to each, with what the preset's scorer reads; one answer is wrong."""
    with path.open("w") as file:
        for a in range(10, 34):
            for k in range(4):
                said = {"role": "assistant", "content": str(a + 38 + (k == 0))}
                asked = {"role": "user", "content": f"{a}+38="}
                line = {"messages": [asked, said], "id": f"{a}-{k}", "a": a, "b": 38, "answer": str(a + 38)}
                file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def scene(open_scene, prefect_api: str) -> Iterator[Scene]:  # type: ignore[no-untyped-def]
    """The page's start model and fewer users; later the log has answers, as the preset's scorer needs them."""
    ports = {"vllm_port": str(free_port()), "prefect_port": str(free_port())}
    seed = random.SystemRandom().randrange(2**32)
    kills = draw_kills(seed)

    def kill_before(scene: Scene, command: Command) -> None:
        for after_s in kills.get(command, ()):
            how = "was killed" if scene.kill(command, after_s) else "ended before it was killed"
            logger.warning("draw_kills(%d): %s %s after %.1f s", seed, command, how, after_s)

    def act_between(scene: Scene, command: Command, printed: str) -> None:
        if "--name nightly" in command.text:
            shutil.rmtree(scene.folder / "chats")
            (scene.folder / "chats").mkdir()
            write_answers(scene.folder / "chats" / "answered.jsonl")
        elif command.text.startswith("rollmill improve"):
            finish_flow_runs(prefect_api, printed)

    real = {
        "serve": {"python": ".venv-vllm/bin/python"},
        "sync": {"transport": "auto", "parity_sequences": 2},
    }
    values = real | {"start_model": {"steps": 900}, "steps": 2, "evaluate": {"n_prompts": 64}}
    with open_scene(__file__, values, None, act_between, kill_before, **ports) as scene:
        for name in ("sums.py", "users.py"):
            (source,) = re.findall(rf"^```python\n(# {name}.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
            fewer = source.replace("range(600)", "range(24)").replace("8000", ports["vllm_port"])
            (scene.folder / name).write_text(fewer)
        (template,) = re.findall(r"save `plain\.jinja`: `([^`]+)`", PAGE)
        (scene.folder / "plain.jinja").write_text(template)
        (scene.folder / "models").unlink()
        shutil.copy(ROOT / "prefect.yaml", scene.folder)
        for preset in (ROOT / "conf").glob("*.yaml"):
            if preset.name != "quickstart.yaml":
                shutil.copy(preset, scene.folder / "conf")
        yield scene
        scene.prepare("env --unset=PREFECT_API_URL rollmill down")


@pytest.mark.parametrize("command", commands_run_by(__file__), ids=str)
def test_a_documented_command_does_what_it_is_there_for(scene: Scene, command: Command) -> None:
    scene.run(command)


def test_the_cycle_that_was_approved_is_in_production(scene: Scene) -> None:
    scene.run(commands_run_by(__file__)[-1])
    assert "/runs/improve-" in str((scene.folder / "policies" / "production").resolve())


def test_after_the_kills_each_run_is_whole_and_no_conversation_is_stored_twice(scene: Scene) -> None:
    scene.run(commands_run_by(__file__)[-1])
    runs = [RunFolder(each.parent) for each in (scene.folder / "runs").glob("*/run.json")]
    assert len(runs) > len(LATEST_S)
    for run in runs:
        assert verify_run(run).findings == [], run.location
        ids = read(run, "rollouts", ["trajectory_id"])["trajectory_id"].to_pylist()
        assert len(ids) == len({*ids}), run.location
