"""What comes out of a run: folders that others read without Rollmill."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rollmill.flows.policies.policy_export import export_policy_here
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.lineage.lineage_trace import find_wrong_policy_files
from rollmill.tasks.store.lineage.policy_lineage import read_lineage
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service.commands import (
    AwaitCheckpoint,
    BeginCheckpoint,
    LoadPolicy,
    StorePolicy,
    TrainStep,
)
from tests.stubs.toy_settings import toy_config

pytestmark = pytest.mark.service

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md"
SEQUENCE = list(range(2, 40))


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Path:
    folder = save_character_tokenizer(tmp_path / "start")
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(folder)
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=1).save_pretrained(folder)
    return folder


async def test_a_policy_is_the_same_from_the_trainer_from_the_command_and_from_the_documented_lines(
    start: Path, batches: Any, run_trainer: Callable[[TrainConfig], Any], tmp_path: Path
) -> None:
    train = TrainConfig(ranks=2, zero_stage=3, lr=1e-2, warmup_steps=0)
    run = RunFolder(tmp_path / "run")
    opened = OpenRun.open(
        run,
        config=toy_config({"model": str(start), "train": train}).model_dump(mode="json"),
        fixed={},
        versions={},
        git_commit="",
        config_of=StoreConfig(),
    )
    opened.close()
    name = opened.manifest.run
    digest = batches.write_step(run.local, 0, batches.uneven_rows(8), run=name)
    async with run_trainer(train) as (client, _):
        await client.do(
            LoadPolicy(
                run_id=name, incarnation=1, model=str(start), folder=run.location, checkpoint=None, version=0
            )
        )
        assert (await client.do(TrainStep(folder=run.location, run_id=name, step=0, digest=digest))).updated
        await client.do(BeginCheckpoint(folder=run.location, version=1))
        stored = Path(await client.do(StorePolicy(folder=run.location, version=1)))
        (said,) = await client.logprobs([SEQUENCE])
        await client.do(AwaitCheckpoint(version=1))
    assert stored == run.local / "policies" / "version=000001"

    exported = tmp_path / "exported"
    done = export(run, exported)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"version 1 of {run.location} is in {exported}" in done.stdout
    with pytest.raises(ConfigError, match="it exists already"):
        export_policy_here(run, None, exported)

    before = logprobs(AutoModelForCausalLM.from_pretrained(start))
    parameter = load_documented()
    for folder in (stored, exported):
        model = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logprobs(model), torch.tensor(said), atol=1e-5, rtol=0)
        assert not torch.allclose(logprobs(model), before, atol=1e-3)
        assert AutoTokenizer.from_pretrained(folder)("1+1=") == AutoTokenizer.from_pretrained(start)("1+1=")
        assert GenerationConfig.from_pretrained(folder).temperature == 0.7
        for each, value in model.named_parameters():
            assert torch.equal(parameter(str(run.checkpoint(1)), each), value), each
        lineage = read_lineage(RunFolder(folder))
        assert (lineage.run, lineage.version, len(lineage.steps)) == (name, 1, 1)
        assert set(lineage.start_model.files) == names_in(start)
        assert list(find_wrong_policy_files(RunFolder(folder), lineage)) == []
        assert (folder / "README.md").read_text().startswith("---")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def export(run: RunFolder, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [str(Path(sys.executable).parent / "rollmill"), "export-policy", run.location, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """Of a sequence's tokens but the first."""
    ids = torch.tensor(SEQUENCE)
    said = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1)
    return said.gather(1, ids[1:, None])[:, 0]


def load_documented() -> Callable[[str, str], torch.Tensor]:
    """The function that the document gives for reading a parameter out of a checkpoint."""
    lines: dict[str, Any] = {}
    exec(DOCUMENT.read_text().split("```python\n")[1].split("```")[0], lines)
    function: Callable[[str, str], torch.Tensor] = lines["parameter"]
    return function
