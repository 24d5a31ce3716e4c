"""Folders in which the commands of pages are run, on stubs of vLLM and a small preset `quickstart`."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_scene import Scene

from tests.documentation.documented_runs import CHANGED
from tests.documentation.page_commands import ROOT, Command, commands_run_by

README = "README.md"
UNSEEN = {"transport": "files", "parity_sequences": 0}
"""A stub computes checksums of weights in files, and no log-probabilities."""
OpenScene = Callable[..., AbstractContextManager[Scene]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the commands of pages other than the README to `make test-all`."""
    for item in items:
        if item.path.parent == Path(__file__).parent and isinstance(item, pytest.Function):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            page = parameters["command"].page if "command" in parameters else parameters.get("name", README)
            if page != README:
                item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module")
def open_scene(
    open_workplace: Callable[[Path], AbstractContextManager[Any]],
    write_stub: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
    prefect_api: str,
) -> OpenScene:
    """A scene of the commands of a test file, for as long.

    What differs from the workplace's preset `small` is given by section; `places` are the addresses named in CHANGED.
    """

    @contextmanager
    def opened(
        file: str,
        values: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        after: Callable[[Scene, Command, str], None] | None = None,
        before: Callable[[Scene, Command], None] | None = None,
        **places: str,
    ) -> Iterator[Scene]:
        folder = tmp_path_factory.mktemp("scene")
        with open_workplace(folder) as place:
            write_preset(folder, {"serve": {"python": write_stub(folder)}, "sync": UNSEEN}, values or {})
            scene = Scene(
                folder,
                commands_run_by(file),
                place.environment | dict(environment or {}),
                CHANGED,
                {"api": prefect_api, **places},
                before,
                after,
            )
            try:
                yield scene
            finally:
                scene.end()

    return opened


def write_preset(folder: Path, *sections: Mapping[str, Mapping[str, Any]]) -> None:
    """The preset `quickstart` of the pages, made of the workplace's `small`, and the algorithms."""
    preset = yaml.safe_load((folder / "conf" / "small.yaml").read_text())
    for values in sections:
        for name, value in values.items():
            preset[name] = {**preset.get(name, {}), **value} if isinstance(value, Mapping) else value
    (folder / "conf" / "quickstart.yaml").write_text(yaml.safe_dump(preset))
    shutil.copytree(ROOT / "conf" / "algorithms", folder / "conf" / "algorithms")


@pytest.fixture(scope="session")
def rewards() -> str:
    """The file `rewards.py` of the page on rescoring."""
    page = (ROOT / "docs" / "how-to" / "rescoring.md").read_text()
    (source,) = re.findall(r"^```python\n(import re.*?)^```", page, re.DOTALL | re.MULTILINE)
    return str(source)
