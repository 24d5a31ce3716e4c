"""`model` may be a name on the Hugging Face hub: the model is downloaded once, without its code."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.flows.configuration.recipe import start_model_folder
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.store.model_folders import is_hub_name
from tests.stubs.hub_server import serve_hub
from tests.stubs.toy_settings import toy_config

NAME = "Some-Org/tiny-model.1"
DOWNLOAD = f"""\
from rollmill.flows.configuration.recipe import download_model
from rollmill.tasks.errors import ConfigError
try:
    download_model("model", "{NAME}")
except ConfigError as error:
    print(error)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_character_tokenizer(folder)
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return folder


def download(workplace: Path, endpoint: str) -> str:
    """Download in a new process, since the library reads its environment once; returns what was printed."""
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(workplace / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", DOWNLOAD]
    done = subprocess.run(
        command, cwd=workplace, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_model_is_downloaded_once_without_code_and_pickles(tmp_path: Path, model: Path) -> None:
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    with serve_hub(NAME, model) as hub:
        assert download(workplace, hub.url) == ""
        first = sorted(hub.downloaded)
        assert download(workplace, hub.url) == ""
    assert sorted(hub.downloaded) == first
    assert "model.safetensors" in first
    assert not {"pytorch_model.bin", "modeling_own.py"} & set(first)
    found = workplace / "models" / NAME
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert (found / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_what_the_hub_does_not_have_and_a_hub_that_cannot_be_reached_are_named(
    tmp_path: Path, model: Path
) -> None:
    with serve_hub("another/model", model) as hub:
        refused = download(tmp_path, hub.url)
    unreachable = download(tmp_path, hub.url)
    for text in (refused, unreachable):
        assert text.startswith(f"model = '{NAME}': there is no such folder, and it cannot be downloaded")
        assert f"copy one to models/{NAME}" in text
    assert "RepositoryNotFoundError" in refused


def test_paths_are_no_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "model").mkdir(parents=True)
    paths = ["/a/b", "./a/b", "../b", "models/Qwen2.5-1.5B-Instruct", "local/model", "a/b/c", "model", "a/.."]
    assert not any(map(is_hub_name, paths))
    assert is_hub_name("Qwen/Qwen2.5-1.5B-Instruct")
    assert start_model_folder(toy_config({"model": "Qwen/Qwen3-4B"})) == Path("models/Qwen/Qwen3-4B")
    assert start_model_folder(toy_config({"model": "local/model"})) == Path("local/model")
