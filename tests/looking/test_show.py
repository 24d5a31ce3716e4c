"""`rollmill show`: one trajectory, its conversation and its tokens."""

import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from rollmill.flows import cli
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.trajectory_record import TrajectoryRecord
from rollmill.tasks.look.tables.view import escape_controls
from rollmill.tasks.look.terminal.trajectory_print import print_trajectory
from rollmill.tasks.look.terminal.trajectory_tokens import (
    LOGPROB,
    Token,
    advantage_scale,
    check_has_values,
    list_tokens,
    print_tokens,
)
from rollmill.tasks.look.web.pages.trajectory_page import make_token_data
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import TrainingSource, read_manifest, write_manifest
from rollmill.tasks.store.segments import SEGMENT_COLUMNS

Command = Callable[..., str]


def test_a_trajectory_is_shown_with_its_conversation_and_what_became_of_it(rollmill: Command) -> None:
    shown = " ".join(rollmill("show", "small", "5.0").split())
    for said in (
        "step 1, group 5, sample 0, calculator 15+25",
        "complete, finish reason stop, 2 turns",
        "1.000 (format 0.1, answer 0.9) by addition@1",
        "-0.210 by brevity@1",
        "+0.300 (3 of 4 survived: mean 0.700, std 0.424)",
        "0 from token 6, 1 from token 8",
        "tool calculator",
        "[15+25=40]40",
    ):
        assert said in shown


def test_a_trajectory_is_shown_with_why_it_was_not_trained_on(rollmill: Command) -> None:
    assert "not trained on: no_reward_spread" in rollmill("show", "small", "4.1")
    assert "ScoreTimeoutError: no verdict within 60 s" in " ".join(rollmill("show", "small", "6.1").split())
    failed = rollmill("show", "small", "5.3")
    assert "RequestError: 503 from the server" in failed
    assert "none: it failed" in failed


def test_a_held_out_trajectory_is_shown_too(rollmill: Command) -> None:
    assert "held out, policy version 3, greedy" in rollmill("show", "small", "v3.1.greedy")


@pytest.mark.parametrize("asked", ["6.0", "6.0.0", "5eed5eed5eed5eed.6.0.0"])
def test_ids_are_taken_short_and_whole_and_json_has_every_column(rollmill: Command, asked: str) -> None:
    shown = json.loads(rollmill("show", "small", asked, "--tokens", "--json"))
    assert shown["trajectory_id"] == "5eed5eed5eed5eed.6.0.0"
    assert shown["messages"][-1]["content"] == "[16+26=42]42"
    assert shown["logprobs"][0] is None
    assert shown["advantage"] == pytest.approx(0.6)
    assert "".join(token["text"] for token in shown["tokens"]) == "16+26=[16+26=42]42<eos>"
    assert [token["version"] for token in shown["tokens"][5:9]] == [None, 0, 0, 1]


def test_rows_that_a_fork_has_of_another_run_are_found(
    small_run: RunFolder, rollmill: Command, tmp_path: Path
) -> None:
    fork = tmp_path / "fork"
    shutil.copytree(small_run.local, fork)
    stored = read_manifest(small_run)
    write_manifest(open_files(RunFolder(fork)), replace(stored, run="f04cf04cf04cf04c"), stored)
    assert (
        json.loads(rollmill("show", str(fork), "6.0", "--json"))["trajectory_id"] == "5eed5eed5eed5eed.6.0.0"
    )
    assert json.loads(rollmill("show", str(fork), "v3.1.greedy", "--json"))["greedy"] is True
    rows = json.loads(rollmill("inspect", str(fork), "--group", "6", "--json"))["trajectories"]
    assert [row["trajectory"] for row in rows] == ["6.0", "6.1", "6.2", "6.3"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("5.9", "near it are 5.0, 5.1, 5.2, 5.3"),
        ("77.0", "it has groups 0 to 11"),
        ("v1.0.greedy", "evaluated are the versions 0, 3"),
        ("v3.8.greedy", "v3.0.greedy"),
        ("0ther0ther0ther0.6.0.0", "near it are"),
        ("whatever", "the run has no such trajectory; it has groups 0 to 11"),
        ("1", "it has groups 0 to 11"),
        ("99999999999999999999.0", "TRAJECTORY = '99999999999999999999.0': the run has no such group"),
        ("5.99999999999999999999", "the run has no such trajectory"),
    ],
)
def test_an_unknown_trajectory_is_refused_with_near_ones(rollmill: Command, asked: str, message: str) -> None:
    assert message in rollmill("show", "small", asked)


def test_a_retrained_run_names_where_its_trajectories_are_stored(
    small_run: RunFolder, rollmill: Command, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "retrained")
    folder.tmp.mkdir(parents=True)
    sources = (TrainingSource("5eed5eed5eed5eed", "small"),)
    write_manifest(open_files(folder), replace(read_manifest(small_run), sources=sources), None)
    for words in (["show", folder.location, "5.0"], ["inspect", folder.location, "--trajectories"]):
        assert "stored trajectories of other runs: small" in rollmill(*words)


def test_tokens_have_texts_whatever_settings_and_templates_are_wrong_today(
    small_run: RunFolder, rollmill: Command, tmp_path: Path
) -> None:
    old, model = tmp_path / "old", tmp_path / "model"
    shutil.copytree(small_run.local, old)
    stored = read_manifest(small_run)
    shutil.copytree(small_run.local.parent.parent / "model", model)
    (model / "chat_template.jinja").write_text("{% if %}")
    wrong = {
        "model": str(model),
        "start_timeout_s": 1e9,
        "serve": {"api_key_env": "X_SECRET"},
        "gone": {"away": 1},
    }
    rollout = {
        "rollout": stored.config["rollout"]
        | {"chat_template": str(tmp_path / "gone.jinja"), "temperature": -1}
    }
    write_manifest(
        open_files(RunFolder(old)), replace(stored, config=stored.config | wrong | rollout), stored
    )

    shown = json.loads(rollmill("show", str(old), "6.0", "--tokens", "--json"))
    assert "".join(token["text"] for token in shown["tokens"]) == "16+26=[16+26=42]42<eos>"


def test_tokens_without_a_tokenizer_are_ids_and_log_probabilities(
    small_run: RunFolder, rollmill: Command, tmp_path: Path
) -> None:
    orphan = tmp_path / "orphan"
    shutil.copytree(small_run.local, orphan)
    stored = read_manifest(small_run)
    config = stored.config | {"model": str(tmp_path / "gone")}
    write_manifest(open_files(RunFolder(orphan)), replace(stored, config=config), stored)
    shown = rollmill("show", str(orphan), "6.0", "--tokens")
    assert "[16+26=42]42" in shown
    assert ["6", "46", "-0.600", "0"] in [line.split() for line in shown.splitlines()]
    tokens = json.loads(rollmill("show", str(orphan), "6.0", "--tokens", "--json"))["tokens"]
    assert (tokens[6]["id"], tokens[6]["text"]) == (46, None)


def test_a_trajectory_without_tokens_says_so(rollmill: Command) -> None:
    assert rollmill("show", "small", "5.3", "--tokens").endswith("none: nothing was sampled\n")


def test_tokens_are_a_table_of_values_without_colours(rollmill: Command) -> None:
    lines = rollmill("show", "small", "6.0", "--tokens").splitlines()
    assert ["6", "46", "'['", "-0.600", "0"] in [line.split() for line in lines]
    assert "\x1b" not in "".join(lines)


def test_tokens_are_coloured_in_a_terminal_with_a_legend(
    rollmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    shown = rollmill("show", "small", "6.0", "--by", "advantage")
    assert "48;2;33;102;172m[" in shown  # the largest advantage of its batch has the scale's full blue
    assert "+0.6" in Text.from_ansi(shown).plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;2" not in rollmill("show", "small", "6.0", "--by", "advantage")


def test_tokens_that_cannot_be_coloured_as_requested_are_refused(rollmill: Command) -> None:
    assert "give advantage, logprob, entropy, ratio" in rollmill("show", "small", "6.0", "--by", "colour")
    assert "so it has no advantage" in rollmill("show", "small", "4.0", "--by", "advantage")
    assert "name the run's model folder" in rollmill("show", "small", "4.0", "--tokens", "--model", "nowhere")


def test_colours_are_darker_for_less_likely_tokens_and_symmetric_for_advantages() -> None:
    likely, unlikely = (LOGPROB.style(value).bgcolor for value in (-0.1, -4.0))
    assert likely is not None
    assert unlikely is not None
    assert sum(likely.get_truecolor()) > sum(unlikely.get_truecolor())
    scale = advantage_scale(2.0)
    assert [scale.style(value).bgcolor for value in (-9.0, 9.0)] == [
        scale.style(value).bgcolor for value in (-2.0, 2.0)
    ]
    assert scale.style(float("nan")).dim


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("a\x1b[31mb\x7f\n\t", "a␛[31mb␡\n\t"),
        ("\x9b31m", "<U+009B>31m"),
        ("user\u202etxt.exe", "user<U+202E>txt.exe"),
        ("pass\u200bword\u2028", "pass<U+200B>word<U+2028>"),
        ("a\u200db, \u200d", "a<U+200D>b, <U+200D>"),
        ("👩\u200d💻 ক\u200dষ", "👩\u200d💻 ক\u200dষ"),
        ("a\u3164b\u2800\U000e0110", "a<U+3164>b<U+2800><U+E0110>"),
        ("❤\ufe0f 1\ufe0f\u20e3 a\ufe0f", "❤\ufe0f 1\ufe0f\u20e3 a<U+FE0F>"),
    ],
)
def test_what_a_model_wrote_cannot_command_or_deceive_the_terminal(written: str, seen: str) -> None:
    assert escape_controls(written) == seen


SAID = "if x:\n\treturn " + "long " * 30 + "\n  é"


@pytest.fixture
def talkative() -> TrajectoryRecord:
    """A trajectory that says what a terminal would break."""
    figures = dict.fromkeys(("reward", "duration_s", "generate_s", "environment_s", "queue_s"), 0.0)
    numbers = dict.fromkeys(("step", "turns", "n_prompt_tokens", "n_completion_tokens"), 1)
    texts = dict.fromkeys(("env", "status", "finish_reason", "error_type", "server", "example_id"), "")
    row: dict[str, Any] = {**figures, **numbers, **texts, "components": {}, "example": {}, "outcome": {}}
    row |= {"trajectory_id": "x", "greedy": True, "started_at": datetime(2026, 11, 1, tzinfo=UTC)}
    row |= {name: [] for name in ("version_span_versions", "version_span_starts", "message_segments")}
    row |= {name: [] for name in SEGMENT_COLUMNS}
    return TrajectoryRecord("x", row | {"messages": [{"role": "assistant", "content": SAID}]}, [], None, {})


def test_a_pipe_gets_every_line_of_a_message_unchanged(talkative: TrajectoryRecord) -> None:
    pipe = io.StringIO()
    print_trajectory(Console(file=pipe), talkative)
    said = [line.removeprefix("  ") for line in pipe.getvalue().split("\n")]
    assert "\n".join(said).endswith(f"\n{SAID}\n")


@pytest.fixture
def branched(talkative: TrajectoryRecord) -> TrajectoryRecord:
    """A trajectory of three segments: a question, another conversation, and the first question rewritten in its middle."""
    said = [("user", "1+1="), ("assistant", "2"), ("user", "help"), ("assistant", "ok"), ("user", "1*1=")]
    row = talkative.row | {"messages": [{"role": role, "content": text} for role, text in said]}
    row |= {"message_segments": [0, 0, 1, 1, 2], "segment_starts": [0, 5, 10], "segment_parents": [-1, -1, 0]}
    row |= {"segment_prefix_tokens": [0, 0, 1], "segment_prefix_messages": [0, 0, 0]}
    row |= {"token_ids": list(range(13)), "loss_mask": [False] * 4 + [True] + [False] * 8}
    row |= {"logprobs": [math.nan] * 4 + [-0.5] + [math.nan] * 8}
    row |= {"version_span_starts": [4], "version_span_versions": [7]}
    return replace(talkative, row=row)


def test_a_tree_of_segments_is_shown_segment_by_segment(branched: TrajectoryRecord) -> None:
    pipe = io.StringIO()
    print_trajectory(Console(file=pipe, width=60), branched)
    shown = [line.split(" ═")[0].split(" ─")[0] for line in pipe.getvalue().split("\n")]
    assert shown[shown.index("segment 0: inherits nothing") :] == [
        *("segment 0: inherits nothing", "user", "  1+1=", "assistant", "  2"),
        *("segment 1: inherits nothing", "user", "  help", "assistant", "  ok"),
        *("segment 2: continues segment 0 after 1 token (0 messages)", "user", "  1*1=", ""),
    ]


def test_tokens_are_listed_with_their_segment(
    branched: TrajectoryRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = list_tokens(branched, None)
    assert [each.segment for each in tokens] == [0] * 5 + [1] * 5 + [2] * 3
    assert [each.version for each in tokens if each.is_sampled] == [7]
    print_tokens(Console(), RunFolder("unused"), branched, tokens, "logprob")
    assert capsys.readouterr().out.split("\n")[1].split()[:2] == ["segment", "index"]
    data = make_token_data(RunFolder("unused"), branched, None)
    assert data["heads"][10] == "segment 2: continues segment 0 after 1 token (0 messages)"


def test_a_terminal_gets_the_beginning_of_a_long_text_and_a_file_all_of_it(
    talkative: TrajectoryRecord,
) -> None:
    long = replace(talkative, row=talkative.row | {"messages": [{"role": "user", "content": "ab" * 50_000}]})
    terminal, file = io.StringIO(), io.StringIO()
    print_trajectory(Console(file=terminal, force_terminal=True, width=80), long)
    print_trajectory(Console(file=file), long)
    assert file.getvalue().count("ab") == 50_000
    assert 9_000 < terminal.getvalue().count("ab") < 11_000
    assert "80,000 more characters" in terminal.getvalue()


def test_tokens_are_coloured_by_the_trainers_annotations(
    talkative: TrajectoryRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = [Token(0, 5, None, False, None, None), Token(1, 6, None, True, -0.5, 0)]
    annotated = replace(talkative, annotations={"entropy": [math.nan, 1.25]})
    print_tokens(Console(), RunFolder("unused"), annotated, tokens, "entropy")
    assert "1.250" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"train\.annotate_every"):
        check_has_values(annotated, "ratio")


def test_a_terminal_without_unicode_is_shown_escapes(
    small_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    monkeypatch.setattr("sys.argv", ["rollmill", "show", small_run.location, "5.0"])
    with pytest.raises(SystemExit) as end:
        cli.run_command()
    assert end.value.code == 0
    sys.stdout.flush()
    assert b"assistant \\u2500" in sys.stdout.buffer.getvalue()  # type: ignore[attr-defined]
