"""The graph of a run's page, as Prefect's API gives it to the UI, and what must hold of it."""

import re
from collections import Counter
from dataclasses import dataclass
from uuid import UUID

import patient

UNNAMED = re.compile(r"([a-z]+)-[0-9a-f]{3}")
"""The name of a task run that was killed before it began: Prefect gives it the one of the task when it begins."""


@dataclass(frozen=True)
class Node:
    """A task run.

    Attributes:
        label: its name.
        state: type of its state.
        parents: names of the task runs that it follows.
        inside: names of the task runs that it is nested in.
    """

    label: str
    state: str
    parents: frozenset[str]
    inside: frozenset[str]


def read_graph(api: str, flow_run: UUID | str) -> list[Node]:
    """The nodes of a flow run's graph."""
    nodes = dict(patient.get(f"{api}/flow_runs/{flow_run}/graph-v2").raise_for_status().json()["nodes"])

    def names(edges: list[dict[str, str]]) -> frozenset[str]:
        return frozenset(nodes[edge["id"]]["label"] for edge in edges)

    return [
        Node(each["label"], each["state_type"], names(each["parents"]), names(each["encapsulating"]))
        for each in nodes.values()
    ]


def check_graph(nodes: list[Node]) -> Counter[tuple[str, str]]:
    """Every score follows its rollout, both are in their step, train follows the step, sync follows train, and all ended.

    Returns:
        How many nodes there are of each kind and state.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        assert node.state in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"), node
        unnamed = UNNAMED.fullmatch(node.label)
        counts[_check_unnamed(node, unnamed[1]) if unnamed else _check_node(node), node.state] += 1
    return counts


def _check_unnamed(node: Node, kind: str) -> str:
    assert node.state in ("CRASHED", "CANCELLED"), node
    assert kind != "score" or {each.split(" / ")[0] for each in node.parents} == node.inside, node
    return kind


def _check_node(node: Node) -> str:
    """The kind of a node, which is where it belongs."""
    match node.label.replace(" / ", " ").split():
        case ["start", "model"]:
            assert (node.parents, node.inside) == (frozenset(), frozenset()), node
            return "start model"
        case ["restore"]:
            assert (node.parents, node.inside) == (frozenset(), frozenset()), node
            return "restore"
        case ["step", _]:
            assert len(node.parents) == 1, node
            assert node.parents <= {"restore"} or all(each.endswith("/ sync") for each in node.parents), node
            return "step"
        case ["step", step, "rollout", _]:
            assert (node.parents, node.inside) == (frozenset(), {f"step {step}"}), node
            return "rollout"
        case ["step", step, "score", label]:
            assert node.inside == {f"step {step}"}, node
            assert node.parents == {f"step {step} / rollout {label}"}, node
            return "score"
        case ["step", step, "train"]:
            assert (node.parents, node.inside) == ({f"step {step}"}, frozenset()), node
            return "train"
        case ["version", version, "sync"]:
            assert (node.parents, node.inside) == ({f"step {int(version) - 1} / train"}, frozenset()), node
            return "sync"
        case ["version", version, "evaluation"]:
            assert node.parents <= {"restore", f"version {version} / sync"}, node
            assert node.parents or node.inside == {"restore"}, node
            return "evaluation"
        case ["version", version, "evaluate", _]:
            assert node.inside == {f"version {version} / evaluation"}, node
            return "evaluate"
    raise AssertionError(f"an unknown node: {node}")
