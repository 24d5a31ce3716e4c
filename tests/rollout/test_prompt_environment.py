"""Problems from files and data sets."""

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import datasets
import polars as pl
import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Environment, Message, Split, make_environment
from rollmill.tasks.rollout.environments.prompts import messages_from_problem

ROWS = [{"question": f"{n}+1?", "answer": f"so it is #### {n + 1}", "level": n % 3} for n in range(200)]


def prompts(path: Path | str, **settings: object) -> Environment:
    given = {"path": str(path), "prompt_column": "question"} | settings
    return make_environment(RolloutConfig.model_validate({"environment": "prompts", "prompts": given}))


def jsonl(folder: Path, rows: list[object]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


async def problems(environment: Environment, split: Split) -> list[object]:
    examples = [await environment.example(split, n) for n in range(environment.size(split))]
    return [example.content["problem"] for example in examples]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
async def test_a_share_is_held_out_and_each_problem_is_in_one_split(tmp_path: Path, kind: str) -> None:
    path = jsonl(tmp_path, list(ROWS))
    if kind != "jsonl":
        pl.DataFrame(ROWS[:100]).write_parquet(tmp_path / "a.parquet")
        pl.DataFrame(ROWS[100:]).write_parquet(tmp_path / "b.parquet")
        pl.DataFrame(ROWS).write_parquet(tmp_path / "all.pq")
        path = (
            tmp_path if kind == "folder" else (tmp_path / "all.pq").rename(tmp_path.with_suffix(".parquet"))
        )
    environment = prompts(path, held_out_share=0.2)
    train, held_out = await problems(environment, "train"), await problems(environment, "held_out")
    assert sorted(train + held_out) == sorted(row["question"] for row in ROWS)
    assert 20 < len(held_out) < 60


async def test_long_conversations_are_split_by_all_that_they_say(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}] * 7
    asked = [[*turns, {"role": "user", "content": row["question"]}, *turns[1:]] for row in ROWS]
    pl.DataFrame({"question": asked, "answer": "7"}).write_parquet(tmp_path / "rows.parquet")
    environment = prompts(tmp_path / "rows.parquet", held_out_share=0.2)
    assert 20 < environment.size("held_out") < 60
    assert environment.size("held_out") + environment.size("train") == len(ROWS)


async def test_the_answer_is_what_the_pattern_finds_and_more_columns_go_to_the_scorer(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    jsonl(tmp_path, list(ROWS[3:])).rename(held_out)
    found = {"answer_pattern": r"####\s*(\d+)", "columns": ["level"], "held_out_path": str(held_out)}
    environment = prompts(jsonl(tmp_path, list(ROWS[:3])), **found)
    example = await environment.example("train", 2)
    n = int(str(example.content["problem"]).split("+")[0])
    assert example.content == {"problem": f"{n}+1?", "answer": str(n + 1), "level": str(n % 3)}
    assert environment.size("train") == 3


async def test_the_episode_opens_with_the_system_prompt_and_ends_with_the_answer(tmp_path: Path) -> None:
    environment = prompts(jsonl(tmp_path, [ROWS[0]] * 2), system="be brief", held_out_share=0.001)
    episode = environment.episode(await environment.example("train", 0), seed=0)
    assert await episode.reply(()) == (Message("system", "be brief"), Message("user", "0+1?"))
    assert not await episode.reply((Message("assistant", "1"),))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
async def test_a_problem_may_be_a_conversation(tmp_path: Path, kind: str) -> None:
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    path = jsonl(tmp_path, [{"question": turns, "answer": 1}])
    if kind == "parquet":
        path = tmp_path / "rows.parquet"
        pl.DataFrame({"question": [turns], "answer": [1]}).write_parquet(path)
    environment = prompts(path, held_out_share=0.0001)
    opening = await environment.episode(await environment.example("train", 0), 0).reply(())
    assert opening == (Message("system", "be kind"), Message("user", "hi"))


async def test_splits_come_from_a_column_or_another_file(tmp_path: Path) -> None:
    by_column = prompts(
        jsonl(tmp_path, list(ROWS)), split_column="level", train_split="0", held_out_split="2"
    )
    assert (by_column.size("train"), by_column.size("held_out")) == (67, 66)
    pl.DataFrame(ROWS[:7]).write_parquet(tmp_path / "other.parquet")
    by_file = prompts(tmp_path / "rows.jsonl", held_out_path=str(tmp_path / "other.parquet"))
    assert (by_file.size("train"), by_file.size("held_out")) == (200, 7)
    by_both = prompts(
        tmp_path / "rows.jsonl",
        held_out_path=str(tmp_path / "other.parquet"),
        split_column="level",
        train_split="0",
    )
    assert (by_both.size("train"), by_both.size("held_out")) == (67, 7)


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        ([ROWS[0], "{oops"], {}, "line 2 is not JSON"),
        ([ROWS[0], "[1]"], {}, "line 2 is not a JSON object"),
        ([ROWS[0], {"question": "x"}], {}, r"row 1 \(counted from 0\) has no 'answer'"),
        ([ROWS[0]], {"prompt_column": "ask"}, "no line has 'ask'"),
        ([ROWS[0]], {"answer_pattern": "(x)"}, "nothing in the 'answer' of row 0"),
        ([ROWS[0]], {"answer_pattern": "(x"}, "not a regular expression"),
        ([ROWS[0]], {"split_column": "level", "train_split": "easy"}, "'level' of .* contains '0'"),
        (
            [ROWS[0]],
            {"columns": ["problem"]},
            "'problem' would replace the problem, which is read from 'question'",
        ),
        (
            [ROWS[0]],
            {"answer_column": "level", "columns": ["answer"]},
            "'answer' would replace the answer, which is read from 'level'",
        ),
        ([ROWS[0]], {"held_out_split": "test"}, "held_out_split = 'test': give the column"),
        ([ROWS[0]], {"path": "nowhere.jsonl"}, "there is no such file"),
        ([ROWS[0]], {"path": ""}, "give the file"),
        ([ROWS[0]], {"path": "name/of-one"}, "format=huggingface"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, rows: list[object], settings: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        prompts(**({"path": str(jsonl(tmp_path, rows))} | settings))


def test_a_parquet_file_without_the_column_says_which_there_are(tmp_path: Path) -> None:
    pl.DataFrame(ROWS).write_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="no column 'ask'; it has question, answer, level"):
        prompts(tmp_path / "rows.parquet", prompt_column="ask")
    (tmp_path / "broken.parquet").write_text("PAR1")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        prompts(tmp_path / "broken.parquet")


async def test_a_data_set_saved_by_the_hugging_face_library_is_read_by_split(tmp_path: Path) -> None:
    both = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:9])}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    environment = prompts(tmp_path / "saved", held_out_split="test")
    assert (environment.size("train"), environment.size("held_out")) == (200, 9)
    with pytest.raises(ConfigError, match="split 'exam' of this Hugging Face data set cannot be read"):
        prompts(tmp_path / "saved", train_split="exam")


async def test_dates_and_decimals_are_text_for_scorers(tmp_path: Path) -> None:
    rows = {
        "question": ["a"] * 3,
        "answer": [1] * 3,
        "day": [date(2026, 1, 2)] * 3,
        "at": [datetime(2026, 1, 2, 3, 4, 5)] * 3,
        "price": [Decimal("1.50")] * 3,
        "tags": [["x"]] * 3,
    }
    pl.DataFrame(rows).write_parquet(tmp_path / "rows.parquet")
    environment = prompts(
        tmp_path / "rows.parquet", columns=["day", "at", "price", "tags"], held_out_path=str(tmp_path)
    )
    content = json.loads(json.dumps((await environment.example("train", 0)).content))
    assert (content["day"], content["price"], content["tags"]) == ("2026-01-02", "1.50", ["x"])
    assert datetime.fromisoformat(content["at"]) == rows["at"][0]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"more": [b"x"]}, "the column 'more' is of type Binary"),
        ({"more": [{"raw": [b"x"]}]}, "the column 'more' is of type Struct"),
        ({"more": [1], "answer": [b"x"]}, "the column 'answer' is of type Binary"),
        (
            {"more": [1], "question": [5]},
            "the column 'question' is of type Int64: expected a text, or a list",
        ),
        ({"more": [1], "question": [["a"]]}, "the column 'question' is of type List"),
        (
            {"more": [1], "question": [[{"role": "robot", "content": "x"}]]},
            r"row 0 \(counted from 0\) has no messages in 'question': Invalid enum value 'robot'",
        ),
    ],
)
def test_a_column_of_a_type_that_cannot_be_used_is_named_at_the_start(
    tmp_path: Path, columns: dict[str, list[object]], says: str
) -> None:
    pl.DataFrame({"question": ["a"], "answer": [1]} | columns).write_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=says) as raised:
        prompts(tmp_path / "rows.parquet", columns=["more"])
    assert "rows.parquet" in str(raised.value)


@pytest.mark.parametrize("bad", [[{"role": "robot", "content": "x"}], [{"role": "user"}]])
def test_messages_in_json_that_are_none_are_named_by_their_row(tmp_path: Path, bad: object) -> None:
    path = jsonl(tmp_path, [ROWS[0], {"question": bad, "answer": 1}])
    with pytest.raises(ConfigError, match=r"row 1 \(counted from 0\) has no messages in 'question'"):
        prompts(path)


def test_a_text_that_only_begins_like_messages_is_a_user_message() -> None:
    for text in ('[{"a": 1}]', "[{x", '[{"role": "user"}, 5]'):
        assert messages_from_problem(text) == (Message("user", text),)


def test_fields_that_only_other_messages_have_are_left_out() -> None:
    assert messages_from_problem([{"role": "user", "content": "hi", "name": None}]) == (
        Message("user", "hi"),
    )
