"""Which modules read pickles: bytes that run code where they are read."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A flow and the workers of scorers that it starts, over pipes that they alone hold; a flow and its Ray actors, through a cluster that
# runs the code of whoever has its token anyway.
MAY_PICKLE = {
    "tasks/score/score_worker.py",
    "tasks/score/score_worker_pool.py",
    "flows/run/executor/group_actor.py",
    "flows/run/executor/ray_executor.py",
}

PICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Of torch.distributed and DeepSpeed; the ranks exchange `tasks/train/rank_messages.py` instead.
COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def find_pickles(source: str) -> Iterator[str]:
    """Imports of modules that pickle, collectives of objects, and torch's and NumPy's loads of pickles."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (each.name for each in names if each.name.split(".")[0] in PICKLING)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in PICKLING:
                    yield module
                yield from (each.name for each in names if each.name in COLLECTIVES)
            case ast.Attribute(attr=name) if name in COLLECTIVES:
                yield name
            case ast.Attribute(value=ast.Name("torch"), attr="load"):
                yield "torch.load"
            case ast.keyword(arg="allow_pickle"):
                yield "allow_pickle"


def test_pickles_are_found() -> None:
    source = "import torch, pickle\nfrom torch.distributed import gather_object\ndist.all_gather_object(a, b)\ntorch.load(c)"
    assert sorted(find_pickles(source)) == ["all_gather_object", "gather_object", "pickle", "torch.load"]


def test_no_module_but_those_of_score_workers_and_ray_reads_pickles() -> None:
    files = [path for folder in ("tasks", "flows") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): set(find_pickles(path.read_text())) for path in files}
    assert {path: names for path, names in found.items() if names} == {
        path: {"pickle"} for path in MAY_PICKLE
    }
