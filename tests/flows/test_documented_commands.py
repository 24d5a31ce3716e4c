"""README and docs as they are written, on a small run: their commands one after another, and their Python."""

import asyncio
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rollmill.flows.settings import load
from rollmill.tasks.processes.launched_process import free_port

pytestmark = pytest.mark.service
ROOT = Path(__file__).parents[2]
STEPS = 3
ANSWER_S = 600.0
LONGEST_S = 900.0

RUN = [
    ("algorithms.md", "rollmill run quickstart+dapo"),
    ("storage.md", "rollmill run quickstart --set store.root=s3://my-bucket/team/runs"),
    ("storage.md", "rollmill inspect s3://my-bucket/team/runs/quickstart"),
    ("README.md", "rollmill run PRESET"),
    ("README.md", "rollmill inspect quickstart"),
    ("README.md", "rollmill inspect quickstart --status failed"),
    ("README.md", "rollmill show quickstart 12.3 --by advantage"),
    ("README.md", "rollmill plot quickstart"),
    ("looking.md", "rollmill inspect calculator --step 20:24"),
    ("looking.md", "rollmill inspect calculator --step 24 --reward :0.2 --sort advantage --limit 2"),
    ("looking.md", "rollmill show calculator 784.6"),
    ("looking.md", "rollmill export RUN --to parquet"),
    ("README.md", "rollmill verify RUN"),
    ("README.md", "rollmill compact RUN"),
    ("README.md", "rollmill verify-sync RUN"),
    ("spans.md", "rollmill spans quickstart"),
    ("spans.md", "rollmill spans quickstart --step 12"),
    ("spans.md", "rollmill spans quickstart --json"),
    ("queries.md", "rollmill inspect quickstart --costs"),
    ("queries.md", 'rollmill sql quickstart "select fate, sum(server_s) from costs group by fate"'),
    ("publish.md", "rollmill publish quickstart --to delta:lake/delta"),
    ("README.md", "rollmill list"),
    ("README.md", "rollmill memory PRESET"),
    ("README.md", "rollmill settings"),
    ("checkpoints.md", "rollmill export-policy RUN FOLDER --version 40"),
    ("operations.md", "rollmill fork runs/quickstart 20 --name warmer --set rollout.temperature=1.2 --set seed=1"),
    ("rescoring.md", "rollmill rescore quickstart --scorer rewards:Estimate --evaluations"),
    ("rescoring.md", "rollmill retrain quickstart --from quickstart --scores estimate@1 --name short --set score.scorer=rewards:Estimate --set train.loss=cispo --set train.clip_low=1 --set train.clip_high=1 --where 'step < 10' --set steps=20"),
    ("rescoring.md", "rollmill replay quickstart --from 0 --to 40"),
    ("rescoring.md", "rollmill replay quickstart --attribute --step 20 --synthetic-traffic 100"),
]  # fmt: skip
"""In this order, with a trainer and a server attached to that `rollmill trainer` and `rollmill vllm` started."""

SMALLER = {
    "PRESET": "quickstart",
    "RUN": "quickstart",
    "FOLDER": "exported",
    "calculator": "quickstart",
    "12": "2",
    "12.3": "5.3",
    "784.6": "5.1",
    "20:24": "0:2",
    "24": "2",
    "20": "2",
    "40": str(STEPS),
}
"""Replacements of a longer run's names and numbers."""

SNIPPETS = {"README.md": 2, "compaction.md": 2, "checkpoints.md": 1, "storage.md": 1}
"""Pages whose Python is run here, and how many blocks they have; that of other pages is run by other tests."""


def page(name: str) -> str:
    (found,) = [ROOT / name] if name == "README.md" else (ROOT / "docs").rglob(name)
    return found.read_text()


def smaller(text: str, s3_root: str) -> list[str]:
    """The words of a command, those of a long run exchanged for the small run's."""
    words = [SMALLER.get(word, word) for word in shlex.split(text)]
    joined = [
        re.sub(r"(?<=\.steps=\[0,)9(?=]$)", "2", re.sub(r"(?<=^steps=)20$", "2", word)) for word in words
    ]
    words = [word.replace("s3://my-bucket/team/runs", s3_root) for word in joined][1:]
    return (
        [*words, "--set", "train.url="] if "retrain" in words else words
    )  # by another loss, so by its own trainer


@pytest.fixture
def services(workplace, start_models: Path) -> Iterator[None]:  # type: ignore[no-untyped-def]
    """A trainer and a server in separate terminals; the preset quickstart, small, is attached to them."""
    conf, ports = workplace.folder / "conf", {"serve": free_port(), "train": free_port()}
    preset = yaml.safe_load((conf / "small.yaml").read_text()) | {"steps": STEPS}
    preset["sync"] = {"timeout_s": ANSWER_S}
    (conf / "quickstart.yaml").write_text(yaml.safe_dump(preset))
    (conf / "algorithms").mkdir()
    (conf / "algorithms" / "dapo.yaml").write_text((ROOT / "conf" / "algorithms" / "dapo.yaml").read_text())
    make = "import asyncio; from rollmill.flows.settings import load; from rollmill.flows.start_model import start_model; "
    subprocess.run(
        [sys.executable, "-c", f"{make}asyncio.run(start_model(load('quickstart')))"],
        cwd=workplace.folder, env=workplace.environment, check=True,
    )  # fmt: skip

    workplace.environment["ROLLMILL_TRAINER_TOKEN"] = "a token of the test"
    started = [
        workplace.start("vllm", "quickstart", "--port", str(ports["serve"])),
        workplace.start("trainer", "quickstart", "--port", str(ports["train"])),
    ]
    try:
        for process in started:
            assert process.stdout
            assert re.match(r"serve.urls=|train.url=", process.stdout.readline())
            threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would hold it up
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        preset["serve"] = preset.get("serve", {}) | {"urls": [urls["serve"]]}
        preset["train"] = preset.get("train", {}) | {"url": urls["train"]}
        (conf / "quickstart.yaml").write_text(yaml.safe_dump(preset))
        asyncio.run(answers(f"{urls['serve']}/health"))
        asyncio.run(answers(f"{urls['train']}/v1/health"))
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(timeout=120)


async def answers(url: str) -> None:
    import httpx

    async with asyncio.timeout(ANSWER_S), httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(url)
            except httpx.TransportError:
                await asyncio.sleep(0.2)
            else:
                return


@pytest.mark.long
def test_the_commands_and_the_python_of_the_pages_do_what_they_are_there_for(
    s3_root: str,  # first: what is started later has its address
    workplace,  # type: ignore[no-untyped-def]
    services: None,
) -> None:
    rewards = re.findall(r"^```python\n(import re.*?)^```", page("rescoring.md"), re.DOTALL | re.MULTILINE)
    (workplace.folder / "rewards.py").write_text(rewards[0])
    for _, text in RUN:
        done = workplace.run(*smaller(text, s3_root), timeout_s=LONGEST_S)
        assert done.returncode == 0, f"{text}\n{done.stdout}"
    for name, n_blocks in SNIPPETS.items():
        blocks = re.findall(r"^```python\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)
        assert len(blocks) == n_blocks, name
        for block in blocks:
            source = block.replace("s3://my-bucket/team/runs", s3_root)
            subprocess.run(
                [sys.executable, "-c", source], cwd=workplace.folder, env=workplace.environment, check=True
            )


@pytest.mark.parametrize(("name", "text"), RUN)
def test_a_command_that_is_run_here_is_on_its_page(name: str, text: str) -> None:
    assert text in " ".join(page(name).replace("\\\n", " ").split())


def test_the_presets_of_the_pages_are_those_of_the_repository() -> None:
    assert load("quickstart").steps > STEPS
