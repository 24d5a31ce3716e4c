"""What README and docs do with a run: its commands one after another, and the pages' Python."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import otlp_receiver
import pytest
from page_scene import Scene

from rollmill.flows.configuration.settings import load
from tests.documentation.page_commands import ROOT, Command, commands_run_by
from tests.stubs.dataset_hub import DatasetHub, serve_dataset_hub

pytestmark = pytest.mark.service
STEPS = 3

SNIPPETS = {"README.md": 2, "compaction.md": 2, "checkpoints.md": 1, "storage.md": 1}
"""Pages whose Python is run here, and how many blocks they have; that of other pages is run by other tests."""


@pytest.fixture(scope="module")
def hub() -> Iterator[DatasetHub]:
    with serve_dataset_hub("some-user/quickstart") as server:
        yield server


@pytest.fixture(scope="module")
def receiver() -> Iterator[otlp_receiver.Receiver]:
    with otlp_receiver.serve() as server:
        yield server


@pytest.fixture(scope="module")
def scene(
    bucket: str,  # first: what is started later has its address
    open_scene,  # type: ignore[no-untyped-def]
    hub: DatasetHub,
    receiver: otlp_receiver.Receiver,
) -> Iterator[Scene]:
    """A run of three steps whose every version is exported; loss and hub of the pages are there."""
    values = {"steps": STEPS, "checkpoint": {"every": 1, "export_every": 1}}
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "none", "HF_HUB_DISABLE_XET": "1"}
    with open_scene(__file__, values, environment, bucket=bucket, otlp=receiver.url) as scene:
        package = scene.folder / "my_package"
        package.mkdir()
        (package / "__init__.py").touch()
        (loss,) = blocks("algorithms.md", "import torch\n\nfrom rollmill.tasks.train.objective.losses")
        (package / "losses.py").write_text(loss)
        write_qwen(scene.folder)
        yield scene


def write_qwen(folder: Path) -> None:
    """What `rollmill memory gsm8k` reads of Qwen2.5-1.5B-Instruct: its sizes."""
    sizes = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    model = folder / "models" / "Qwen2.5-1.5B-Instruct"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(sizes))
    shutil.copy(ROOT / "conf" / "gsm8k.yaml", folder / "conf")


def blocks(name: str, beginning: str = "") -> list[str]:
    """The Python of a page."""
    (page,) = [ROOT / name] if name == "README.md" else (ROOT / "docs").rglob(name)
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [each for each in found if each.startswith(beginning)]


@pytest.mark.parametrize("command", commands_run_by(__file__), ids=str)
def test_a_documented_command_does_what_it_is_there_for(scene: Scene, command: Command) -> None:
    scene.run(command)


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_python_of_a_page_runs(scene: Scene, bucket: str, name: str) -> None:
    commands = commands_run_by(__file__)
    scene.run([each for each in commands if each.page == name or name != "README.md"][-1])
    assert len(blocks(name)) == SNIPPETS[name]
    for block in blocks(name):
        source = block.replace("s3://my-bucket/team/runs", bucket)
        subprocess.run([sys.executable, "-c", source], cwd=scene.folder, env=scene.environment, check=True)


@pytest.mark.long
def test_the_hub_and_the_receiver_have_what_was_sent(
    scene: Scene, hub: DatasetHub, receiver: otlp_receiver.Receiver
) -> None:
    scene.run(commands_run_by(__file__)[-1])
    assert any(Path(name).suffix == ".parquet" for name in hub.files)
    assert receiver.spans


def test_the_presets_of_the_pages_are_those_of_the_repository() -> None:
    assert load("quickstart").steps > STEPS
