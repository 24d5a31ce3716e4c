"""Code of the user that a setting names by import path: whatever is wrong with it is one ConfigError before the start."""

import re
import socket
from pathlib import Path

import pytest

from rollmill.flows.checks.preflight import preflight
from rollmill.flows.configuration.settings import load
from rollmill.tasks.errors import ConfigError

ENVIRONMENTS = Path(__file__).parents[1] / "rollout"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raising", "RuntimeError: no data ("),
        ("Ending", "SystemExit: 0 ("),
        ("LongName", "its name is 'xxx"),
        ("ControlName", r"its name is '\x1b[31m'; give a text of 1 to 100 printable"),
        ("HalfName", r"its name is '\ud800'"),
        ("NumberName", "its name is 3"),
        ("EmptyName", "its name is ''"),
        ("NoName", "AttributeError: 'NoName' object has no attribute 'name'"),
        ("AsyncSize", "size('train') must return a number of problems, and returned <coroutine"),
        ("TextSize", "size('train') must return a number of problems, and returned 'many'"),
        ("RaisingSize", "OSError: no disk"),
        ("EndlessSize", "size('train') must be at most 10000000, and is 9223372036854775807"),
        ("NumberedExample", 'example("train", 0) failed: EpisodeError: expected a text in UTF-8 as the id'),
        ("HalfExample", 'example("train", 0) failed: EpisodeError: expected a text in UTF-8 as the id'),
        ("NoTraining", "it has no training problem"),
        ("NumberTools", "its tools must be a sequence of JSON schemas, and are 3"),
        ("TextStop", "its stop must be a sequence of texts, and is 'abc'"),
        ("NumberStates", "its states must be a mapping of column types by name, and are 3"),
        ("RaisingExample", "example(\"train\", 0) failed: KeyError: 'question'"),
        ("NoExample", 'example("train", 0) failed: EpisodeError: expected an Example'),
        (
            "BlockingExample",
            "object dict can't be used in 'await' expression: write the method as `async def`",
        ),
        ("NoEpisode", "AttributeError: 'NoneType' object has no attribute 'reply'"),
        ("EndingOpening", "SystemExit: the environment would end the process"),
        ("TextOpening", "EpisodeError: expected a sequence of Message"),
        ("EmptyOpening", "the opening of its first episode has no message"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_environment_that_cannot_give_an_opening_is_refused(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    with pytest.raises(ConfigError) as refused:
        preflight(load("quickstart", (f"rollout.environment=faulty_environments:{name}",)))

    assert str(refused.value).startswith(f"rollout.environment = 'faulty_environments:{name}': ")
    assert message in str(refused.value)


def test_states_whose_names_are_no_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    with pytest.raises(ConfigError, match="a column of states cannot be called 3"):
        preflight(load("quickstart", ("rollout.environment=faulty_environments:NumberedStates",)))


@pytest.mark.parametrize(
    "name", ["BlockingConstructor", "BlockingSize", "WaitingExample", "WaitingEpisode", "WaitingReply"]
)
def test_an_environment_that_blocks_is_refused_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    with pytest.raises(ConfigError, match=r"not opened within start_timeout_s = 0\.2 s: .* blocks"):
        preflight(
            load("quickstart", (f"rollout.environment=faulty_environments:{name}", "start_timeout_s=0.2"))
        )


def test_a_server_that_hangs_or_is_not_there_ends_the_run_before_its_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        arguments = (f"rollout.environment.args.url={url}", "rollout.environment.args.action=message")
        words = ("rollout.environment=openenv", *arguments)
        with pytest.raises(ConfigError, match=r"start_timeout_s = 0\.2 s: .* a server does not answer"):
            preflight(load("quickstart", (*words, "start_timeout_s=0.2")))
    with pytest.raises(ConfigError, match=f"the server at {url} does not answer"):
        preflight(load("quickstart", words))


MODULES = {
    "SyntaxError": "def f(:",
    "KeyError": "{}['VARIABLE']",
    "FileNotFoundError": "open('/nowhere/problems.jsonl')",
    "RuntimeError": "raise RuntimeError('no GPU')",
    "SystemExit": "import sys; sys.exit()",
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("field", ["rollout.environment", "score.scorer", "score.advantage"])
def test_a_module_that_cannot_be_imported_is_refused(
    field: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"own_{kind.lower()}"
    (tmp_path / f"{module}.py").write_text(MODULES[kind])
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match=rf"{re.escape(field)} = '{module}:f': .*{kind}"):
        preflight(load("quickstart", (f"{field}={module}:f",)))


@pytest.mark.parametrize("field", ["rollout.environment", "score.advantage"])
def test_a_function_that_ends_the_process_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(field)} = 'sys:exit': .*SystemExit"):
        preflight(load("quickstart", (f"{field}=sys:exit",)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("nosuch:f", "no module 'nosuch'"),
        ("__main__:f", "no module '__main__'"),
        ("gspo2", "did you mean gspo?"),
    ],
)
def test_a_loss_without_a_module_is_refused_without_trying_it(loss: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.loss = '{loss}': .*{re.escape(message)}"):
        # No process starts within this time.
        preflight(load("quickstart", (f"train.loss={loss}", "start_timeout_s=1e-9")))


def test_a_loss_that_cannot_be_tried_in_time_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.loss = 'math:sqrt': it was not tried .* start_timeout_s = 0\.01"
    ):
        preflight(load("quickstart", ("train.loss=math:sqrt", "start_timeout_s=0.01")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit()", r"SystemExit: "),
        pytest.param("import os; os._exit(0)", r"ended without a result", marks=pytest.mark.long),
        pytest.param(
            "def f(tokens): raise SystemExit(0)", r"it raised SystemExit: 0", marks=pytest.mark.long
        ),
    ],
)
def test_a_loss_that_ends_its_process_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_loss.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"train\.loss = 'own_loss:f': .*{message}"):
        preflight(load("quickstart", ("train.loss=own_loss:f",)))
