"""Secrets do not come into settings, and what foreign text says is shown without them and without commands to a terminal."""

import asyncio
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rollmill.flows.cli import run_command
from rollmill.flows.collect import collect
from rollmill.flows.configuration.config import RescoreConfig
from rollmill.flows.configuration.settings import validate
from rollmill.flows.prefect_integration.progress import CONSOLE
from rollmill.flows.rescore import rescore
from rollmill.tasks.errors import ConfigError, mask_credentials, printable
from rollmill.tasks.look.tables.scores import read_score_totals
from rollmill.tasks.look.tables.view import escape_controls
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_launch import check_guarded
from rollmill.tasks.store.folders import RunFolder
from tests.stubs.toy_settings import validate_toy
from tests.stubs.vllm_server import StubVllmServer

SECRET = "planted-password"
ADDRESS = f"http://me:{SECRET}@host:5000/path"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"serve": {"urls": [ADDRESS]}}, "serve.urls"),
        ({"train": {"url": ADDRESS}}, "train.url"),
        ({"train": {"kl": {"urls": [ADDRESS]}}}, "train.kl.urls"),
        ({"score": {"judge": {"url": ADDRESS}}}, "score.judge.url"),
        ({"score": {"reward_model": {"url": ADDRESS}}}, "score.reward_model.url"),
        ({"observe": {"mlflow_uri": ADDRESS}}, "observe.mlflow_uri"),
        ({"store": {"root": f"s3://key:{SECRET}@bucket/runs"}}, "store.root"),
    ],
)
def test_an_address_with_a_password_is_refused_without_showing_it(
    values: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(values)
    assert refused.value.field == field
    assert "***" in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "http://me:se/cret@host:5000",
        "http://me:se cret@host",
        "http://host:5000/?api_key=secret",
        "http://token@host",
    ],
)
def test_a_secret_is_found_anywhere_in_an_address(address: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({"observe": {"mlflow_uri": address}})
    assert "cret" not in str(refused.value).replace("secret;", "")


@pytest.mark.parametrize(
    "argument", ["--api-key", "--api_key", f"--api-key={SECRET}", "--api-k", "--hf-token", "--hf_tok"]
)
def test_a_key_among_arguments_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({"serve": {"extra_args": [argument, SECRET]}})
    assert refused.value.field == "serve.extra_args"
    assert SECRET not in str(refused.value)


def test_arguments_about_tokens_are_none() -> None:
    arguments = ("--max-num-batched-tokens=512", "--tokenizer-mode", "auto", "--api-server-count=1")
    assert ServeConfig(extra_args=arguments).extra_args == arguments


@pytest.mark.parametrize("field", ["score.reward_model.api_key_env", "score.judge.api_key_env"])
@pytest.mark.parametrize("secret", ["sk-planted", "planted word", "hf_planted"])
def test_a_secret_in_the_place_of_a_variables_name_is_refused(field: str, secret: str) -> None:
    values: dict[str, object] = {}
    place = values
    *sections, name = field.split(".")
    for section in sections:
        place[section] = place = {}
    place[name] = secret
    with pytest.raises(ConfigError, match="name of the environment variable") as refused:
        validate(values)
    assert refused.value.field == field
    assert secret not in str(refused.value)


def test_a_server_that_others_reach_needs_a_key() -> None:
    open_to_all = ServeConfig(extra_args=("--host=0.0.0.0",))
    with pytest.raises(ConfigError, match="environment variable ROLLMILL_VLLM_API_KEY"):
        check_guarded(open_to_all, {})
    check_guarded(open_to_all, {"ROLLMILL_VLLM_API_KEY": SECRET})
    check_guarded(ServeConfig(extra_args=("--host", "127.0.0.1")), {})
    with pytest.raises(ConfigError) as refused:
        check_guarded(ServeConfig(), {}, host="0.0.0.0")
    assert refused.value.field == "--host"


def test_text_of_errors_is_stored_without_passwords() -> None:
    assert mask_credentials(f"no answer from {ADDRESS}") == "no answer from http://***@host:5000/path"
    assert SECRET not in printable("x" * 1990 + ADDRESS)
    assert mask_credentials("mail me@host, see http://host/@me") == "mail me@host, see http://host/@me"


def test_an_error_commands_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["rollmill", "run", "no-\x1b[2Jsuch"])
    with pytest.raises(SystemExit):
        run_command()
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "␛[2J" in said


def test_the_output_of_a_run_commands_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.flows.prefect_integration import progress

    lines: list[str] = []
    logger = type("Logger", (), {"info": lambda self, line: lines.append(line)})()
    monkeypatch.setattr(progress, "run_logger", lambda: logger)
    with CONSOLE.capture() as captured:
        progress.say(f"server: \x1b]0;title\x07 {ADDRESS} [bold]")
    assert "\x1b" not in captured.get()
    assert lines == [escape_controls("server: \x1b]0;title\x07 http://***@host:5000/path [bold]")]


@pytest.mark.service
def test_scorers_of_a_run_and_of_its_rescoring_have_the_variables_that_its_settings_name(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PLANTED_VARIABLE", SECRET)
    model = save_character_tokenizer(tmp_path / "model")
    (model / "config.json").write_text("{}")
    port = free_port()
    server = StubVllmServer(model, 0.01).serve(port)
    store = {"root": str(tmp_path / "runs")}
    config = validate_toy(
        {
            "steps": 1,
            "model": str(model),
            "rollout": {"groups_per_step": 1, "group_size": 2, "env_variables": ["PLANTED_VARIABLE"]},
            "score": {"scorer": "planted_scorer:sees_variable"},
            "serve": {"urls": [f"http://127.0.0.1:{port}"]},
            "store": store,
        }
    )
    again = RescoreConfig.model_validate(
        {"score": {"scorer": "planted_scorer:sees_variable_too"}, "store": store}
    )
    try:
        with temporary_settings({PREFECT_API_URL: prefect_api}):
            folder = RunFolder(asyncio.run(collect("seen", config)))
            asyncio.run(rescore("seen", again))
    finally:
        server.stop()
    assert [each.reward for each in read_score_totals(folder)] == [1.0, 1.0]
