"""What the verifiers library must have that it does not export: a newer version fails here, by name."""

import importlib

import pytest
import verifiers
from packaging.version import Version

from rollmill.tasks.rollout.environments.verifiers import private_verifiers

V1 = "verifiers.v1"
SYMBOLS = [
    (f"{V1}.configs.agent", "agent_config_fields"),
    (f"{V1}.dialects.chat", "message_to_wire"),
    (f"{V1}.harnesses.null", "NullHarness.launch"),
    (f"{V1}.harnesses.null", "NullHarness.resolve_prompt"),
    (f"{V1}.harnesses.utils.launch", "CHAT_PROGRAM_SOURCE"),
]
OF_THE_CHAT_PROGRAM = [
    "async def connect_mcp(",
    "class Compactor",
    "def note_good(",
    "async def run_chat_loop(",
]


@pytest.mark.parametrize(("module", "name"), SYMBOLS)
def test_verifiers_has_what_is_used_of_it(module: str, name: str) -> None:
    found = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"{module} has no {name} any more: see private_verifiers.py"
        found = getattr(found, part)


@pytest.mark.parametrize("text", OF_THE_CHAT_PROGRAM)
def test_the_chat_program_has_what_is_called_in_it(text: str) -> None:
    assert text in private_verifiers.CHAT_PROGRAM_SOURCE


def test_every_name_of_the_register_is_looked_up_here() -> None:
    assert set(private_verifiers.__all__) == {name.partition(".")[0] for _, name in SYMBOLS}


def test_the_register_was_written_for_the_installed_minor_version() -> None:
    assert Version(verifiers.__version__).release[:2] == Version(private_verifiers.SEEN_IN).release[:2]
