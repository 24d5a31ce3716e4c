"""Judges and reward models, against a small server whose answers a test sets."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import ConfigError, JudgeUnparsableError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scorers.judge import (
    AttemptScore,
    Judgement,
    Ranking,
    count_shared_messages,
    parse_answer,
    ranking_prompt,
    scores_from_ranking,
)
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.score.terms import check_scorer
from rollmill.tasks.store.rows import Rows, column_values

MakeRows = Callable[[Sequence[str]], Rows]


class Server:
    """Answers each request with the next of its answers, the last one again and again.

    An answer is a status, or what the model says, or a whole body.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[object] = []
        self.requests: list[dict] = []
        self.headers: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers.get("Authorization", ""))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        if isinstance(answer, str):
            answer = {"choices": [{"message": {"content": answer}, "finish_reason": "stop"}]}
        return web.json_response(answer)

    @property
    def prompts(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    port = free_port()
    made = Server(f"http://127.0.0.1:{port}/v1")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    app.router.add_post("/v1/pooling", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield made
    await runner.cleanup()


def config(scorer: str, server: Server, **settings: object) -> ScoreConfig:
    endpoint = {"url": server.url, "model": "judge"} | settings
    section = "reward_model" if scorer == "reward_model" else "judge"
    return ScoreConfig.model_validate({"scorer": scorer, section: endpoint})


async def score_rows(settings: ScoreConfig, rows: Rows) -> dict[str, list]:
    async with Scoring(settings, "run") as scoring:
        scores = await scoring.score(rows, step=3)
    return {name: list(column_values(scores, name)) for name in scores.schema.names}


async def test_a_judge_is_asked_with_the_conversation_and_the_reference(
    server: Server, rollouts: MakeRows
) -> None:
    server.answers = ['{"explanation": "good", "score": 0.75}']
    rows = await score_rows(config("judge", server), rollouts(["two"]))
    assert (rows["reward"], rows["status"]) == ([0.75], ["scored"])
    (prompt,) = server.prompts
    assert "[user] 1+1=" in prompt
    assert "[assistant] two" in prompt
    assert "Reference answer: 2" in prompt


async def test_a_judges_prompt_may_be_a_file(server: Server, rollouts: MakeRows, tmp_path) -> None:
    (tmp_path / "prompt.txt").write_text("{{ env }}: is {{ answer }} the same as {{ example.answer }}?")
    server.answers = ['{"score": 1}']
    await score_rows(config("judge", server, prompt_file=str(tmp_path / "prompt.txt")), rollouts(["two"]))
    assert server.prompts == ["addition: is two the same as 2?"]


UNPARSABLE = ["it is good", "", '{"score": "high"}', '{"score": 1.5}', '{"score": 1} I think', '{"grade": 1}']


@pytest.mark.parametrize("said", UNPARSABLE)
async def test_an_unparsable_judgement_is_a_failed_score_and_is_not_retried(
    server: Server, rollouts: MakeRows, said: str
) -> None:
    server.answers = [said]
    rows = await score_rows(config("judge", server), rollouts(["two"]))
    assert (rows["status"], rows["error_type"]) == (["failed"], ["JudgeUnparsableError"])
    assert len(server.requests) == 1


async def test_a_judgement_that_was_cut_names_the_setting(server: Server, rollouts: MakeRows) -> None:
    server.answers = [{"choices": [{"message": {"content": '{"sc'}, "finish_reason": "length"}]}]
    rows = await score_rows(config("judge", server), rollouts(["two"]))
    assert "score.judge.max_tokens" in rows["error"][0]


async def test_requests_with_transient_errors_are_retried(server: Server, rollouts: MakeRows) -> None:
    server.answers = [503, 429, '{"score": 1}']
    assert (await score_rows(config("judge", server), rollouts(["two"])))["reward"] == [1.0]


@pytest.mark.slow
async def test_persistent_errors_are_rows_after_the_last_attempt(server: Server, rollouts: MakeRows) -> None:
    server.answers = [503]
    rows = await score_rows(config("judge", server), rollouts(["two"]))
    assert (rows["error_type"], len(server.requests)) == (["TransientRequestError"], 4)


async def test_requests_with_permanent_errors_are_not_retried(server: Server, rollouts: MakeRows) -> None:
    server.answers = [400]
    rows = await score_rows(config("judge", server), rollouts(["two"]))
    assert (rows["error_type"], len(server.requests)) == (["RequestError"], 1)


async def test_an_answer_of_another_shape_is_a_row(server: Server, rollouts: MakeRows) -> None:
    server.answers = [{"error": "no such model"}, {"choices": []}]
    rows = await score_rows(config("judge", server), rollouts(["two", "three"]))
    assert rows["error_type"] == ["ScoreError", "ScoreError"]
    assert any("no such model" in error for error in rows["error"])


async def test_a_name_that_a_prompt_does_not_have_is_a_row(
    server: Server, rollouts: MakeRows, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("{{ example.solution }}")
    rows = await score_rows(
        config("judge", server, prompt_file=str(tmp_path / "prompt.txt")), rollouts(["two"])
    )
    assert rows["error_type"] == ["UndefinedError"]


async def test_the_key_comes_from_the_environment(
    server: Server, rollouts: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answers = ['{"score": 1}']
    await score_rows(config("judge", server, api_key_env="JUDGE_KEY"), rollouts(["two"]))
    assert server.headers == ["Bearer secret"]


def ranking(*scores: tuple[int, float]) -> str:
    return json.dumps({"attempts": [{"attempt": i, "explanation": "", "score": s} for i, s in scores]})


async def test_ruler_asks_once_for_a_group_and_scores_each_attempt(
    server: Server, rollouts: MakeRows
) -> None:
    server.answers = [ranking((2, 0.1), (1, 0.9), (3, 0.5))]
    rows = await score_rows(config("ruler", server), rollouts(["two", "three", "2"]))
    assert rows["reward"] == [0.9, 0.1, 0.5]
    (prompt,) = server.prompts
    assert prompt.count("1+1=") == 1


@pytest.mark.parametrize(
    "said",
    [
        ranking((1, 0.5)),
        ranking((1, 0.5), (1, 0.5)),
        ranking((1, 0.5), (3, 0.5)),
        ranking((1, 0.5), (2, 2.0)),
        "[]",
    ],
)
async def test_a_ranking_with_attempts_missing_or_scores_out_of_range_fails_the_group(
    server: Server, rollouts: MakeRows, said: str
) -> None:
    server.answers = [said]
    rows = await score_rows(config("ruler", server), rollouts(["two", "three"]))
    assert rows["error_type"] == ["JudgeUnparsableError"] * 2


def test_messages_that_attempts_share_are_sent_once_but_each_keeps_its_last_one() -> None:
    question, answer, other = ({"role": "user", "content": text} for text in ("q", "a", "b"))
    assert count_shared_messages([[question, answer], [question, other], [question, answer, other]]) == 1
    assert count_shared_messages([[question, answer], [question, answer]]) == 1
    assert count_shared_messages([[question]]) == 0
    assert "All attempts" not in ranking_prompt("", [[question], [other]])


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8).flatmap(
        lambda s: st.permutations(list(enumerate(s, 1)))
    )
)
def test_scores_come_back_by_attempt_whatever_their_order(numbered: list[tuple[int, float]]) -> None:
    ranking = Ranking([AttemptScore(number, score) for number, score in numbered])
    assert scores_from_ranking(ranking, len(numbered)) == [score for _, score in sorted(numbered)]


@pytest.mark.parametrize(
    "content",
    [
        '{"score": 1}',
        ' {"score": 1, "why": "}"}\n',
        '```json\n{"score": 1}\n```',
        '<think>{"score": 0}</think>{"score": 1}',
        'opened in the prompt: {"score": 0}\n</think>\n\n```json\n{"score": 1}```',
        '{"why": "it never says </think>", "score": 1}',
        '<think>so</think>{"why": "it never says </think>", "score": 1}',
    ],
)
def test_thoughts_and_a_fence_around_the_answer_are_removed(content: str) -> None:
    assert parse_answer(content, Judgement).score == 1.0


@given(st.text())
def test_any_other_text_is_unparsable(content: str) -> None:
    with pytest.raises(JudgeUnparsableError):
        parse_answer(content, Judgement)


async def test_a_reward_model_gives_one_output_of_the_conversation(
    server: Server, rollouts: MakeRows
) -> None:
    server.answers = [{"data": [{"data": [0.25, -1.5]}]}]
    rows = await score_rows(config("reward_model", server, output=1), rollouts(["two"]))
    assert rows["reward"] == [-1.5]
    assert [each["content"] for each in server.requests[0]["messages"]] == ["1+1=", "two"]


async def test_of_outputs_by_token_the_last_tokens_counts(server: Server, rollouts: MakeRows) -> None:
    server.answers = [{"data": [{"data": [[0.1], [0.2]]}]}]
    assert (await score_rows(config("reward_model", server), rollouts(["two"])))["reward"] == [0.2]


async def test_an_output_that_a_reward_model_lacks_is_a_row(server: Server, rollouts: MakeRows) -> None:
    server.answers = [{"data": [{"data": [0.1]}]}]
    rows = await score_rows(config("reward_model", server, output=1), rollouts(["two"]))
    assert "score.reward_model.output = 1" in rows["error"][0]


JUDGE = {"url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"scorer": "judge"}, "score.judge.model"),
        ({"scorer": "ruler", "judge": {"model": "m"}}, "score.judge.url"),
        ({"scorer": "reward_model"}, "score.reward_model.url"),
        (
            {"scorer": "judge", "judge": JUDGE | {"api_key_env": "NOT_SET_ANYWHERE_KEY"}},
            "score.judge.api_key_env",
        ),
        ({"scorer": "judge", "judge": JUDGE | {"prompt_file": "absent"}}, "score.judge.prompt_file"),
        ({"sum": [{"scorer": "judge"}]}, "score.judge.model"),
        ({"scorer": "judge", "judge": JUDGE | {"score_range": [1, 1]}}, "score.judge.score_range"),
    ],
)
def test_a_missing_requirement_of_a_scorer_is_an_error_before_anything_starts(
    settings: dict, field: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_scorer(ScoreConfig.model_validate(settings))
    assert raised.value.field == field


def test_a_prompt_that_is_no_template_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("{{")
    judge = JUDGE | {"prompt_file": str(tmp_path / "prompt.txt")}
    with pytest.raises(ConfigError, match="not a Jinja template: line 1") as raised:
        check_scorer(ScoreConfig.model_validate({"scorer": "judge", "judge": judge}))
    assert raised.value.field == "score.judge.prompt_file"


def test_another_prompt_is_another_version(server: Server, tmp_path: Path) -> None:
    file, keys = tmp_path / "prompt.txt", set()
    for prompt in ("a", "b"):
        file.write_text(prompt)
        keys.add(Scoring(config("judge", server, prompt_file=str(file)), "run").key)
    assert len(keys) == 2
