"""What the verifiers library must have that it does not export: a newer version fails here, by name."""

import importlib
from importlib.metadata import version
from types import ModuleType

import pytest
from packaging.version import Version

# The library takes eight seconds to import.
pytestmark = pytest.mark.slow

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


@pytest.fixture
def register() -> ModuleType:
    return importlib.import_module("rollmill.tasks.rollout.environments.verifiers.private_verifiers")


@pytest.mark.parametrize(("module", "name"), SYMBOLS)
def test_verifiers_has_what_is_used_of_it(module: str, name: str) -> None:
    found = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"{module} has no {name} any more: see private_verifiers.py"
        found = getattr(found, part)


@pytest.mark.parametrize("text", OF_THE_CHAT_PROGRAM)
def test_the_chat_program_has_what_is_called_in_it(text: str, register: ModuleType) -> None:
    assert text in register.CHAT_PROGRAM_SOURCE


def test_every_name_of_the_register_is_looked_up_here(register: ModuleType) -> None:
    assert set(register.__all__) == {name.partition(".")[0] for _, name in SYMBOLS}


def test_the_register_was_written_for_the_installed_minor_version(register: ModuleType) -> None:
    assert Version(version("verifiers")).release[:2] == Version(register.SEEN_IN).release[:2]
