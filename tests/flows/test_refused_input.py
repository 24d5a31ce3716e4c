"""What a user types or writes into a file wrongly is one short message, whatever it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.flows.checks.machine_needs import check_address, check_store
from rollmill.flows.configuration.presets import parse_yaml
from rollmill.flows.configuration.settings import load, parse_value
from rollmill.flows.run.folder import run_folder
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.run.run_search import find_run


def laughs(opening: str, closing: str, n_lines: int = 10) -> str:
    """YAML of `n_lines` lines whose aliases mean 10^(n_lines - 1) values."""
    lines = [f"a0: &a0 {opening}x: 1{closing}" if opening == "{" else f"a0: &a0 {opening}1{closing}"]
    for n in range(1, n_lines):
        names = ", ".join(f"k{i}: *a{n - 1}" if opening == "{" else f"*a{n - 1}" for i in range(10))
        lines.append(f"a{n}: &a{n} {opening}{names}{closing}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nsteps: 2\n", "steps is given twice (line 1)"),
        ("train:\n  lr: 1\n  kl: {coef: 0, coef: 1}\n", "coef is given twice (line 3)"),
        ("seed: 012\n", "012 would be read as 10: write that, or quote it (line 1)"),
        ("seed: 1:30\n", "1:30 would be read as 90"),
        ("seed: [1", "expected ',' or ']', but got '<stream end>' (line 1)"),
        ("steps: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("[" * 1000, "nested too deeply"),
        ("score: &score [*score]", "a value contains itself"),
        ("train: &train {kl: {coef: *train}}", "a value contains itself"),
        (laughs("[", "]").replace("a9:", "score:"), " values, more than 100000"),
        (laughs("{", "}").replace("a9:", "score:"), " values, more than 100000"),
        ("seed: \x00", "special characters are not allowed"),
    ],
)
def test_yaml_that_is_wrong_or_read_otherwise_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path
) -> None:
    preset = tmp_path / "own.yaml"
    preset.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(str(preset))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["/data/run #1", "Rule #1 counts.", "[a, b] # two", "'a' #b"])
def test_a_value_that_yaml_would_cut_at_a_comment_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="as a comment"):
        load("quickstart", (f"score.judge.rubric={value}",))
    assert parse_value("'run #1'") == "run #1"
    assert parse_value("a#b") == "a#b"


@pytest.mark.parametrize("value", ["12", "1e-6", "nan", "inf"])
def test_a_quoted_number_stays_a_text(value: str) -> None:
    assert isinstance(parse_value(value), int | float)
    assert parse_value(f"'{value}'") == parse_value(f'"{value}"') == value


def test_ordinary_yaml_is_read_as_before() -> None:
    text = "a: &a {b: 1, c: 0}\nd: {<<: *a, c: -20}\ne: [1e-6, 0x1F, 1_000, '012', yes, null]\n"
    given = {"b": 1, "c": 0}
    assert parse_yaml(text) == {
        "a": given,
        "d": given | {"c": -20},
        "e": ["1e-6", 31, 1000, "012", True, None],
    }


@pytest.mark.parametrize("text", [laughs("[", "]", 5), laughs("{", "}", 5)], ids=["lists", "sections"])
def test_a_value_is_cut_in_a_message(text: str, tmp_path: Path) -> None:
    preset = tmp_path / "own.yaml"
    preset.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(str(preset))
    assert len(str(refused.value)) < 500
    assert len(str(ConfigError("model", "x" * 5000, "no"))) < 230


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=true", "seed = True: give a number, not true or false"),
        ("train.lr=false", "train.lr = False: give a number"),
        ("serve.python=a\0b", "special characters are not allowed"),
        ('serve.python="a\\0b"', "serve.python = 'a\\x00b': a text may hold no NUL"),
        ("model=\udcff", "not YAML: "),
        ('model="\\ud800"', "model = '\\ud800': a text may hold no NUL and no half of a character"),
        (f"steps={10**30}", "the number is too large for an integer of 64 bits"),
        (f"rollout.group_size={2**63}", "too large for an integer of 64 bits"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", (override,))
    assert message in str(refused.value)


@pytest.mark.parametrize("root", ["s3:/bucket/runs", "~/runs", "", "http://host/x", "file:/x"])
def test_a_mistyped_root_is_no_folder(root: str) -> None:
    with pytest.raises(
        ConfigError, match=r"store\.root = .*: give a folder on a local disk, without ~, or s3:"
    ):
        check_store(root)


def test_names_that_no_file_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot write to .* name too long"):
        check_store("x" * 5000)
    with pytest.raises(ConfigError, match=r"run name = .* at most 200 characters"):
        run_folder("x" * 201, load("quickstart"))


def test_a_wrong_name_lists_some_of_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(90):
        run = tmp_path / "runs" / f"run{n:02d}"
        run.mkdir(parents=True)
        (run / "run.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"runs in runs/ are run00, .*, run09 and 80 more$"):
        find_run("run99x")


def test_outside_of_a_project_its_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="go to the project's folder, which has conf/ and runs/"):
        find_run("mine")
    with pytest.raises(
        ConfigError, match="go to the project's folder, which has conf/ and runs/; presets are"
    ):
        load("mine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("settings", "No space left on device"),
        (f"inspect {'x' * 300}", "File name too long"),
    ],
)
def test_a_command_that_fails_says_so_in_one_message(words: str, message: str) -> None:
    command = [sys.executable, "-m", "rollmill.flows.cli", *words.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("host", ["999.9.9.9", "203.0.113.1", "nosuch.invalid", "x" * 300, "\udcff"])
def test_an_address_of_another_machine_is_refused_for_listening(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host = .*: it is no address of this machine"):
        check_address("--host", host)
    for own in ("127.0.0.1", "localhost", "0.0.0.0"):
        check_address("--host", own)
