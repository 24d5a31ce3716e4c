"""Every documented command is run by a test or has a reason why none can run it: the table in documented_runs.py is true.

A file that runs commands takes their text from the page, so that no test runs another command than the page has:
all of them as parameters (`commands_run_by`), or each by a part of it (`find_command`).
"""

import ast

import pytest

from tests.documentation.documented_runs import (
    KINDS_NOT_RUN,
    KINDS_RUN_BY,
    NOT_RUN,
    REST,
    RUN_BY,
)
from tests.documentation.page_commands import (
    COMMANDS,
    ROOT,
    Command,
    command_kind,
    find_command,
    find_named,
    find_runs,
)

RUNS = find_runs()
FILES = sorted({by for entries in RUN_BY.values() for by in entries})
ALL_OF_THEM = ".parametrize('command', commands_run_by(__file__), ids=str)"
KINDS = {kind: reason for reason, kinds in KINDS_NOT_RUN.items() for kind in kinds}


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.in_fence], ids=str)
def test_a_command_in_a_fence_is_run_by_one_test_or_has_one_reason(command: Command) -> None:
    assert len(RUNS.get(command, [])) == 1, (
        "tests/documentation/documented_runs.py says which test runs it, or why none"
    )


@pytest.mark.parametrize("command", [each for each in COMMANDS if not each.in_fence], ids=str)
def test_a_command_in_a_sentence_is_of_a_kind_that_is_run_or_has_a_reason(command: Command) -> None:
    kind = command_kind(command.text)
    known = {command_kind(each.text) for each in RUNS} | KINDS_RUN_BY.keys() | KINDS.keys()
    assert kind in known, f"no test runs `{kind}`; KINDS_RUN_BY in tests/documentation/documented_runs.py"


@pytest.mark.parametrize("page", sorted(RUN_BY.keys() | NOT_RUN.keys()))
def test_an_entry_is_a_command_of_its_page(page: str) -> None:
    texts = [text for table in (RUN_BY, NOT_RUN) for some in table.get(page, {}).values() for text in some]
    assert [text for text in texts if text not in REST and not find_named(page, text)] == []
    used = {by for command, some in RUNS.items() if command.page == page for by in some}
    assert sorted(RUN_BY.get(page, {}).keys() - used) == [], "it has no command left"


def test_a_kind_is_that_of_a_command_in_a_sentence_and_of_no_command_that_is_run() -> None:
    named = {command_kind(each.text) for each in COMMANDS if not each.in_fence}
    run = {command_kind(each.text) for each in RUNS}
    assert sorted((KINDS_RUN_BY.keys() | KINDS.keys()) - (named - run)) == []


@pytest.mark.parametrize("file", FILES)
def test_a_file_takes_the_commands_that_it_runs_from_their_pages(file: str) -> None:
    calls = [node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.Call)]
    written = [ast.unparse(node) for node in calls]
    if any(each.endswith(ALL_OF_THEM) for each in written) and "scene.run(command)" in written:
        return
    taken = {
        find_command(str(ROOT / file), ast.literal_eval(node.args[1]))
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id == "find_command"
    }
    assert [command.text for command, by in RUNS.items() if file in by and command.text not in taken] == []


@pytest.mark.parametrize("kind", KINDS_RUN_BY)
def test_the_file_of_a_kind_has_its_words(kind: str) -> None:
    source = (ROOT / KINDS_RUN_BY[kind]).read_text()
    words = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert kind.split()[-1] in words
