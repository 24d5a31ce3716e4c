"""What the viewer reads of a run, what its pages say, and who may ask for them."""

import asyncio
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import plotly.io
import pytest
from flask.testing import FlaskClient

from rollmill.flows.configuration.recipe import run_tokenizer
from rollmill.tasks.errors import ConfigError, StoreError
from rollmill.tasks.look.tables import sql_query
from rollmill.tasks.look.tables.selection import Interval, Selection
from rollmill.tasks.look.web import app as web_server
from rollmill.tasks.look.web import run_data
from rollmill.tasks.look.web.app import make_app, render_page
from rollmill.tasks.look.web.pages import compare_page
from rollmill.tasks.look.web.run_data import RowCache, RunData
from rollmill.tasks.look.web.urls import Query
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.run.run_search import find_run

Command = Callable[..., str]
PORT = 4300
AT = {"base_url": f"http://127.0.0.1:{PORT}/"}
OURS = "the-token"


def show(source: RunData, path: str, search: str = "") -> str:
    """A page's content as it is sent."""
    return plotly.io.json.to_json_plotly(render_page(source, path, search))


def query_ids(source: RunData, search: str, *, held_out: bool = False) -> tuple[int, list[str]]:
    """How many trajectories a query has, and which come first."""
    query = Query.of(search)
    found = source.trajectories(query.selection(evaluations=held_out), query["text"], 0, 100, query["where"])
    return found.n, [row["trajectory"] for row in found.rows]


@pytest.fixture
def source(small_run: RunFolder) -> RunData:
    return RunData(small_run, 0.0, run_tokenizer)


@pytest.fixture
def client(source: RunData) -> FlaskClient:
    client = make_app(source, OURS, 1.0).server.test_client()
    for host in ("127.0.0.1", "localhost"):
        assert client.get(f"/?token={OURS}", base_url=f"http://{host}:{PORT}/").status_code == 303
    return client


def test_the_newest_step_comes_first_unless_another_order_is_asked_for(source: RunData) -> None:
    assert query_ids(source, "")[1][:2] == ["8.0", "8.1"]
    assert query_ids(source, "?sort=trajectory")[1][:2] == ["0.0", "0.1"]
    assert query_ids(source, "?sort=-n_completion_tokens&step=0")[1][0] == "1.0"
    assert query_ids(source, "?sort=-reward&env=addition")[1][:2] == ["10.0", "10.1"]


@pytest.mark.parametrize(
    "words",
    [
        {"status": "failed"},
        {"status": "failed,cancelled"},
        {"status": "unscored"},
        {"reward": ":0.2"},
        {"reward": "0.5:", "env": "calculator"},
        {"step": "1:2", "group": "5"},
        {"group": "6", "scorer": "brevity@1", "reward": "-0.05:"},
    ],
)
def test_the_viewer_filters_as_inspect_does(
    source: RunData, rollmill: Command, words: dict[str, str]
) -> None:
    options = [text for name, value in words.items() for text in (f"--{name}", value)]
    rows = json.loads(rollmill("inspect", "small", "--trajectories", "--json", *options))["trajectories"]
    n, found = query_ids(source, Query(words).search)
    assert n == len(rows)
    assert set(found) == {row["trajectory"] for row in rows}


def test_a_page_of_rows_has_rewards_advantages_and_the_last_message(source: RunData) -> None:
    (row,) = [
        row for row in source.trajectories(Selection(group=5), "", 0, 10).rows if row["trajectory"] == "5.0"
    ]
    assert row["reward"] == 1.0
    assert row["advantage"] == pytest.approx(0.3)
    assert row["answer"] == "[15+25=40]40"


def test_trajectories_are_found_by_the_text_of_their_messages(source: RunData) -> None:
    assert set(query_ids(source, "?text=%5B15%2B25%3D40")[1]) == {"5.0", "5.1"}
    assert query_ids(source, "?text=nobody+says+this") == (0, [])
    assert query_ids(source, "?text=36&step=0", held_out=True)[0] == 3


def test_a_redone_trajectory_is_counted_once(redone_run: RunFolder) -> None:
    n, found = query_ids(RunData(redone_run, 0.0, run_tokenizer), "?group=5")
    assert n == 4
    assert "5.3.1" in found


def test_groups_are_filtered_by_their_outcome(source: RunData) -> None:
    assert source.groups(Query.of("?status=trained").selection(), 0, 10).n == 6
    assert source.groups(Query.of("?reward=1:").selection(), 0, 10).n == 3
    with pytest.raises(ConfigError, match="no_reward_spread"):
        source.groups(Query.of("?status=lost").selection(), 0, 10)


@pytest.mark.parametrize("group", [":5", "3:7", "5:", "2.5"])
def test_the_filter_of_a_group_takes_one_number(group: str) -> None:
    with pytest.raises(ConfigError, match="give the number of one group"):
        Query({"group": group}).selection()


def test_a_wrong_address_is_answered_with_what_is_wrong(source: RunData) -> None:
    assert "near it are" in show(source, "/trajectory/5.9")
    assert "the run has no such group" in show(source, "/trajectory/99.0")
    assert "There is no such page" in show(source, "/nothing")
    assert "the run has cancelled, complete" in show(source, "/trajectories", "?status=failed,nosuch")
    assert "the run has addition, calculator" in show(source, "/trajectories", "?env=nosuch")
    assert "duration_s" in show(source, "/trajectories", "?sort=-nosuch")
    assert "give one of addition@1, brevity@1, v0, v3" in show(source, "/compare", "?a=loud@1")


def test_scorers_are_compared_by_trajectory_and_versions_by_prompt(source: RunData) -> None:
    assert "45 trajectories in both; mean reward 0.540 by addition@1" in show(source, "/compare")
    assert "±" in show(source, "/compare")
    few = show(source, "/compare", "?step=1")
    assert "trajectories in both; mean reward" in few
    assert "±" not in few, "too few for an interval"
    held_out = show(source, "/compare", "?a=v0&b=v3")
    assert (
        "sampled: 1 prompt in both; mean reward 1.000 of v0 and 1.000 of v3; v3 is higher for 0" in held_out
    )
    assert "greedy: 2 prompts in both; mean reward 1.000 of v0 and 1.000 of v3" in held_out
    both = show(source, "/pair/v0.1.greedy/v3.1.greedy")
    assert "policy version 0, greedy" in both
    assert "policy version 3, greedy" in both


def test_several_answers_to_a_held_out_prompt_are_paired_by_their_seed(
    several_answers: RunFolder, rollmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Scores beyond so many are limited to the newest steps; evaluations have versions instead.
    monkeypatch.setattr(compare_page, "MOST_ROWS", 1)
    source = RunData(several_answers, 0.0, run_tokenizer)
    held_out = show(source, "/compare", "?a=v0&b=v3")
    assert (
        "sampled: 1 prompt in both; mean reward 0.750 of v0 and 1.000 of v3; v3 is higher for 1" in held_out
    )
    rows = compare_page.read_comparison(source, Query.of("?a=v0&b=v3"), 0, 10).rows
    assert [row["prompt"] for row in rows] == ["0 sampled2", "0 greedy", "1 greedy", "0 sampled"]
    assert all(row["first"].removeprefix("v0.") == row["second"].removeprefix("v3.") for row in rows)
    assert "policy version 3, sampled" in show(source, "/trajectory/v3.1.sampled2")
    shown = rollmill("show", str(several_answers.local), "5eed5eed5eed5eed.v3.1.sampled2", "--json")
    assert json.loads(shown)["trajectory"] == "v3.1.sampled2"


def test_a_run_without_a_rollout_waits_for_it_and_a_removed_one_says_so(
    small_run: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.local.mkdir()
    shutil.copy(small_run.local / "run.json", folder.local)
    source = RunData(folder, 0.0, run_tokenizer)
    assert "Waiting for the first rollouts" in show(source, "/")
    for path in ("/groups", "/trajectories", "/held-out", "/compare"):
        assert '"role":"alert"' not in show(source, path)
    assert query_ids(source, "") == (0, [])
    shutil.rmtree(folder.local)
    assert "no longer exists" in show(source, "/trajectories")


def test_a_run_on_s3_has_the_same_pages(small_run_on_s3: RunFolder, source: RunData) -> None:
    there = RunData(find_run(small_run_on_s3.location), 0.0, run_tokenizer)
    for search in ("", "?status=failed", "?reward=0.5:&sort=reward"):
        assert query_ids(there, search) == query_ids(source, search)
    assert show(there, "/trajectory/5.0") == show(source, "/trajectory/5.0")


def test_the_cache_equals_the_stored_rows_also_after_new_and_compacted_shards(
    small_run: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(small_run.local, folder.local)
    later = folder.local / "rollouts" / "step=000002"
    later.rename(tmp_path / "later")
    shelf, columns = RowCache(folder, 0.0), ["trajectory_id", "status"]
    before, revision = shelf.rows("rollouts", columns), shelf.revision(["rollouts"])
    assert shelf.rows("rollouts", columns) is before
    (tmp_path / "later").rename(later)
    after = shelf.rows("rollouts", columns)
    assert after.sort("trajectory_id").equals(
        scan(folder, "rollouts", columns).collect().sort("trajectory_id")
    )
    assert (len(before), len(after)) == (32, 48)
    assert shelf.revision(["rollouts"]) != revision
    assert shelf.rows("rollouts", columns, step=1).equals(scan(folder, "rollouts", columns, step=1).collect())
    shutil.rmtree(folder.local / "rollouts")
    assert len(shelf.rows("rollouts", columns)) == 0


def test_pages_change_nothing_below_the_run(small_run: RunFolder, source: RunData) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        found = {path: path.stat() for path in small_run.local.rglob("*")}
        return {path: (status.st_mtime_ns, status.st_size) for path, status in found.items()}

    before = files()
    for path in ("/", "/groups", "/trajectories", "/trajectory/5.0", "/compare", "/held-out"):
        show(source, path)
    query_ids(source, "?text=5")
    assert files() == before


@pytest.mark.parametrize(
    ("headers", "is_answered"),
    [
        ({}, True),
        ({"Host": f"localhost:{PORT}"}, True),
        ({"Host": f"rebound.example:{PORT}"}, False),
        ({"Host": "127.0.0.1:80"}, True),  # a tunnel may have another port
        ({"Host": f"127.0.0.1:{PORT}", "Origin": "http://127.0.0.1:80"}, False),
        ({"Host": "[", "Origin": "http://["}, False),
        ({"Origin": f"http://127.0.0.1:{PORT}", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "http://elsewhere.example"}, False),
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, False),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, True),
    ],
)
def test_the_viewer_answers_only_its_own_pages_and_links_to_them(
    client: FlaskClient, headers: dict[str, str], is_answered: bool
) -> None:
    assert (client.get("/", headers=headers, **AT).status_code == 200) is is_answered


def test_the_viewer_answers_only_requests_that_its_pages_send(client: FlaskClient) -> None:
    for method in (client.post, client.put, client.delete):
        assert method("/trajectory/5.0", **AT).status_code == 403
    crossed = client.post("/_dash-update-component", json={}, headers={"Origin": "http://else.example"}, **AT)
    assert crossed.status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../../run.json",
        "/assets/%2e%2e/%2e%2e/run.json",
        "/download/trajectory/..%2f..%2frun.json",
        "/_dash-component-suites/dash/../../run.json",
    ],
)
def test_no_address_is_a_path_of_the_disk(client: FlaskClient, path: str) -> None:
    answer = client.get(path, **AT)
    assert b"5eed5eed" not in answer.data
    assert answer.status_code in (404, 500) or b"rollmill" in answer.data.lower()


def test_a_page_may_load_nothing_from_elsewhere_and_run_no_inline_script(
    client: FlaskClient,
) -> None:
    answer = client.get("/", **AT)
    rules = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in rules["script-src"]
    assert b"://" not in answer.data.replace(b"http://www.w3.org", b"")


def test_all_stored_columns_of_a_trajectory_can_be_downloaded(client: FlaskClient) -> None:
    answer = client.get("/download/trajectory/5.0.json", **AT)
    assert answer.json["messages"][-1]["content"] == "[15+25=40]40"
    assert "attachment" in answer.headers["Content-Disposition"]
    assert client.get("/download/trajectory/99.0.json", **AT).status_code == 404


def test_a_port_that_is_taken_is_refused_and_the_default_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen there"):
            web_server.open_listener("127.0.0.1", port)
        monkeypatch.setattr(web_server, "PORT", port)
        with web_server.open_listener("127.0.0.1", None) as other:
            assert port < other.getsockname()[1] < port + web_server.OTHER_PORTS


def test_a_run_whose_manifest_is_damaged_is_refused_before_a_port_is_opened(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.local.mkdir()
    (folder.local / "run.json").write_text("{")
    with pytest.raises(StoreError, match=r"run\.json is damaged: .*restore it from a copy of the run"):
        web_server.serve_viewer(folder, run_tokenizer, 0, 1.0, opens_browser=False)


def test_a_query_is_read_as_it_is_written() -> None:
    query = Query.of("?step=1%3A2&status=failed&nonsense=1&text=%3Cb%3E+%26")
    assert query.values == {"step": "1:2", "status": "failed", "text": "<b> &"}
    assert Query.of(query.search) == query
    assert query.selection().steps == Interval(1, 2)
    assert query.but(step="", env="x").search == "?status=failed&text=%3Cb%3E+%26&env=x"


def test_pages_are_read_by_several_at_once(source: RunData) -> None:
    async def ask() -> list[tuple[int, list[str]]]:
        calls = [asyncio.to_thread(query_ids, source, "?sort=-reward") for _ in range(8)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert all(each == answers[0] for each in answers)


def test_a_condition_in_sql_selects_trajectories_together_with_the_filters(source: RunData) -> None:
    every, _ = query_ids(source, "")
    found = {
        where: query_ids(source, f"?where={where}")[0] for where in ("reward+>+0.5", "not+(reward+>+0.5)")
    }
    assert 0 < found["reward+>+0.5"] < every
    assert sum(found.values()) <= every
    n, ids = query_ids(source, "?where=sample+=+0&step=1")
    assert n == len(ids) > 0
    assert all(each.endswith(".0") for each in ids)
    assert Query.of("?where=sample+=+0").search == "?where=sample+%3D+0"


def test_a_condition_in_sql_selects_held_out_trajectories_by_their_own_columns(source: RunData) -> None:
    every, _ = query_ids(source, "", held_out=True)
    found = {
        where: query_ids(source, f"?where={where}", held_out=True)
        for where in ("greedy", "not+greedy", "policy_version+=+3", "reward+<+100")
    }
    assert found["greedy"][0] + found["not+greedy"][0] == every
    assert all(each.endswith("greedy") for each in found["greedy"][1])
    assert all(each.startswith("v3.") for each in found["policy_version+=+3"][1])
    # A missing reward is no number: neither below nor above.
    above, _ = query_ids(source, "?where=reward+>=+100", held_out=True)
    assert above == 0 < found["reward+<+100"][0] <= every


def test_a_condition_that_takes_too_long_or_too_much_memory_is_ended(
    source: RunData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "LONGEST_S", 0.3)
    endless = "(select sum(a.range * b.range) from range(10000000) a, range(10000000) b) > 0"
    with pytest.raises(ConfigError, match=r"takes longer than 0\.3 s; select fewer rows"):
        source.trajectories(Query.of("").selection(), "", 0, 10, endless)
    monkeypatch.setattr(run_data, "LONGEST_S", 60.0)
    monkeypatch.setattr(sql_query, "MOST_MEMORY", "50MB")
    large = "(select len(list(range)) from range(100000000)) > 0"
    with pytest.raises(ConfigError, match="needs more than 50MB of memory; select fewer rows"):
        source.trajectories(Query.of("").selection(), "", 0, 10, large)


@pytest.mark.parametrize(
    "where",
    [
        "rewrd > 0.5",
        "reward >",
        "(" * 5000 + "true" + ")" * 5000,
        "true); create table t as (select 1",
        "exists (from read_csv('/etc/passwd'))",
        "exists (from read_text('/etc/passwd'))",
        "true); copy (select 1) to 'copied.csv'; select (1",
        "true); attach 'attached.db'; select (1",
        "true); install httpfs; select (1",
    ],
)
def test_a_condition_that_is_wrong_or_reads_files_is_refused_in_one_line(source: RunData, where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        source.trajectories(Query.of("").selection(), "", 0, 10, where)
    assert "\n" not in refused.value.remedy
