"""The rules of the house that import-linter cannot say."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
CODE = sorted(file for package in ("flows", "tasks") for file in (ROOT / package).rglob("*.py"))
TYPED = [
    *CODE,
    *sorted(file for folder in ("benchmarks", "tests/stubs") for file in (ROOT / folder).rglob("*.py")),
]
FLOWS = sorted(
    ".".join(("rollmill", *file.relative_to(ROOT).with_suffix("").parts))
    for file in (ROOT / "flows").rglob("*.py")
    if file.stem != "__init__"
)
CONSTRAINTS = [*ROOT.glob("constraints*.txt"), *(ROOT / "conf" / "vllm").glob("constraints*.txt")]
DEPLOYED = (
    "rollmill.flows.annotate",
    "rollmill.flows.collect",
    "rollmill.flows.evaluate",
    "rollmill.flows.post_train",
    "rollmill.flows.promote",
    "rollmill.flows.rescore",
    "rollmill.flows.retrain",
)
PLUGIN = (
    "rollmill.tasks.sync.vllm_plugin.plugin",
    "rollmill.tasks.sync.vllm_plugin.transfer_engine",
    "rollmill.tasks.sync.vllm_plugin.server_routes",
)  # all are loaded by their names
PLUGIN_MAY_IMPORT = {
    "fastapi",
    "httpx",
    "msgspec",
    "numpy",
    "torch",
    "vllm",
    "safetensors",
}  # vLLM needs all of them
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
REGISTRIES = [
    "pypi" + ".org",
    "python" + "hosted",
    "download." + "pytorch",
    "ghcr" + ".io",
    "quay" + ".io",
    "nvcr" + ".io",
]
MACHINE_PATHS = re.compile(r"(?<![\w.\]])/(home|root|Users|work|opt|mnt)/\w")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Who imports whom, other distributions included by their top-level name."""
    return grimp.build_graph("rollmill", include_external_packages=True, cache_dir=None)


def tree() -> list[Path]:
    """Every text file of the repository, those not yet committed included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    return [file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:4096]]


def modules(graph: grimp.ImportGraph) -> set[str]:
    """Our own modules."""
    return {module for module in graph.modules if module.split(".")[0] == "rollmill"}


def stage_task(module: str) -> bool:
    """True for tasks.<stage>.task."""
    return re.fullmatch(r"rollmill\.tasks\.\w+\.task", module) is not None


def test_every_init_is_empty() -> None:
    assert [file for file in CODE if file.name == "__init__.py" and file.read_bytes()] == []


def test_every_package_has_an_init() -> None:
    assert {file.parent for file in CODE if not (file.parent / "__init__.py").exists()} == set()


def test_tests_have_no_init() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_task_modules_are_imported_by_flows_alone(graph: grimp.ImportGraph) -> None:
    importers = {
        (importer, module)
        for module in modules(graph)
        if stage_task(module)
        for importer in graph.find_modules_that_directly_import(module)
    }
    assert {pair for pair in importers if not pair[0].startswith("rollmill.flows.")} == set()


def test_every_task_run_is_tried_once_whatever_prefects_default_is() -> None:
    """The page on run pages promises it: a resumed run repeats what is missing, from the data sets."""
    trees = [ast.parse(file.read_text()) for file in CODE]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]
    decorators = [ast.unparse(each) for node in functions for each in node.decorator_list]
    tasks = [each for each in decorators if each.startswith("task(")]
    assert len(tasks) >= 10
    assert [each for each in tasks if "retries=0" not in each] == []


def test_prefect_is_imported_by_flows_and_task_modules_alone(graph: grimp.ImportGraph) -> None:
    importers = graph.find_modules_that_directly_import("prefect")
    assert {
        each for each in importers if not each.startswith("rollmill.flows.") and not stage_task(each)
    } == set()


def test_vllm_is_imported_by_what_the_plugin_reaches_alone(graph: grimp.ImportGraph) -> None:
    if "vllm" in graph.modules:
        assert graph.find_modules_that_directly_import("vllm") <= plugin_side(graph)


def plugin_side(graph: grimp.ImportGraph) -> set[str]:
    """The plugin and our modules that it imports, directly or not."""
    return set(PLUGIN).union(*(graph.find_upstream_modules(each) & modules(graph) for each in PLUGIN))


def test_plugin_reaches_only_sync_errors_spans_and_machine_among_our_modules(
    graph: grimp.ImportGraph,
) -> None:
    side = plugin_side(graph)
    also_allowed = {
        "rollmill",
        "rollmill.tasks",
        "rollmill.tasks.errors",
        "rollmill.tasks.observe.spans",
        "rollmill.tasks.processes.machine",
    }
    allowed = {each for each in side if each.startswith("rollmill.tasks.sync")} | also_allowed
    assert side - allowed == set()


def test_plugin_side_imports_only_the_standard_library_and_what_vllm_brings_along(
    graph: grimp.ImportGraph,
) -> None:
    external = {
        (module, imported)
        for module in plugin_side(graph)
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.split(".")[0] not in {"rollmill"} | PLUGIN_MAY_IMPORT | sys.stdlib_module_names
    }
    assert external == set()


def test_only_one_module_starts_python_modules() -> None:
    """Any other `python -m` would put the working folder first on the child's path."""
    starters = [
        file.name for file in CODE if re.search(r"sys\.executable,\s*\*?\(?\s*\"-m\"", file.read_text())
    ]
    assert not starters


def test_supervisor_imports_only_the_standard_library(graph: grimp.ImportGraph) -> None:
    imported = graph.find_modules_directly_imported_by("rollmill.tasks.processes.supervisor")
    assert {each for each in imported if each not in sys.stdlib_module_names} == set()


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """All modules of a new process: `deployed`, once it has imported the flows that a worker starts, and `flows`, once it has all."""
    script = "import importlib, json, sys\nfound = {}\n"
    for name, modules in (("deployed", DEPLOYED), ("flows", FLOWS)):
        script += f"for each in {modules!r}: importlib.import_module(each)\n"
        script += f"found[{name!r}] = list(sys.modules)\n"
    script += "print(json.dumps(found))"
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False, text=True
    )
    assert not shown.returncode, shown.stderr
    found: dict[str, list[str]] = json.loads(shown.stdout)
    return found


@pytest.mark.slow
def test_every_flow_module_can_be_imported(imported: dict[str, list[str]]) -> None:
    assert set(FLOWS) <= set(imported["flows"])


@pytest.mark.slow
def test_the_flow_process_imports_no_torch(imported: dict[str, list[str]]) -> None:
    assert {"torch", "deepspeed", "transformers", "vllm"} & set(imported["flows"]) == set()


@pytest.mark.slow
def test_a_flow_that_a_worker_starts_imports_no_matplotlib(imported: dict[str, list[str]]) -> None:
    # A worker imports the flow once more for each run that is cancelled, and says Cancelled after that.
    assert {"matplotlib", "plotly"} & set(imported["deployed"]) == set()


def test_the_command_starts_without_prefect() -> None:
    script = (
        "import sys, rollmill.flows.cli; print(sorted({'prefect', 'pyarrow', 'polars'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert shown.stdout.strip() == "[]"


def test_no_module_is_called_by_a_vague_name() -> None:
    assert {file for file in CODE if file.stem in VAGUE_NAMES or file.parent.name in VAGUE_NAMES} == set()


def test_no_module_is_called_like_one_of_the_standard_library_or_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in project["dependencies"]}
    taken = (sys.stdlib_module_names | dependencies) - {"__init__"}
    assert {str(file.relative_to(ROOT)) for file in CODE if file.stem in taken} == set()


def test_every_ignored_type_error_has_a_reason() -> None:
    bare = re.compile(r"type: " + r"ignore(\[[\w, -]+\])?\s*$")
    found = [
        (file, n)
        for file in TYPED
        for n, line in enumerate(file.read_text().splitlines())
        if bare.search(line)
    ]
    assert found == []


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{n}: {line.strip()}"
        for file in tree()
        for n, line in enumerate(file.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATHS.search(line) or any(registry in line for registry in REGISTRIES)
    ]
    assert found == []


@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT)) for path in CONSTRAINTS))
def test_constraints_pin_public_versions_and_nothing_else(name: str) -> None:
    pin = re.compile(r"[a-z0-9][a-z0-9._-]*==[0-9][a-z0-9.]*")
    assert [line for line in (ROOT / name).read_text().splitlines() if not pin.fullmatch(line)] == []


def test_tests_of_the_product_do_not_import_benchmarks() -> None:
    tests = [file for file in (ROOT / "tests").rglob("*.py") if "benchmarks" not in file.parts]
    importing = re.compile(r"^\s*(from|import) benchmarks\b", re.MULTILINE)
    assert [file for file in tests if importing.search(file.read_text())] == []
