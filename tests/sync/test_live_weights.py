"""Sums over a worker's live weights find every planted fault at small learning rates, and no other."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollmill.tasks.sync.vllm_plugin.live_weights import ExpectedSums, LiveWeights, sum_words

N_UPDATES = 40


class Worker:
    """A live model in bfloat16 and the trainer's weights in float32, which take steps of `lr` as AdamW's first ones."""

    def __init__(self, folder: Path, lr: float) -> None:
        from transformers import Qwen2ForCausalLM

        self.lr, self.random = lr, torch.Generator().manual_seed(0)
        stored = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model: Any = stored
        self.weights = {name: each.detach().float() for name, each in stored.named_parameters()}
        self.live = LiveWeights(SimpleNamespace(model=str(folder), dtype=torch.bfloat16))
        self.live.note_start(self.model)

    def update(self) -> ExpectedSums:
        """Let the trainer take a step and the server receive it, without putting it in place."""
        for each in self.weights.values():
            each += self.lr * torch.randn(each.shape, generator=self.random).sign()
        return self.live.expect((name, each.bfloat16()) for name, each in self.weights.items())

    def put_in_place(self, kept: Callable[[str], bool] = lambda _: False) -> None:
        """Load the live model, but for the tensors that keep their old weights."""
        with torch.no_grad():
            for name, live in self.model.named_parameters():
                if not kept(name):
                    live.copy_(self.weights[name])

    def changed(self) -> set[str]:
        """Names of the tensors that the last step changes in bfloat16."""
        return {
            name
            for name, live in self.model.named_parameters()
            if not torch.equal(live, self.weights[name].bfloat16())
        }


@pytest.fixture(params=[1e-6, 1e-5])
def worker(request: pytest.FixtureRequest, tied_model: Path) -> Worker:
    # Stored in the server's precision: weights of a start model are not rounded again at each update.
    return Worker(tied_model, request.param)


def test_correct_weights_never_differ_for_any_columns(worker: Worker) -> None:
    for _ in range(N_UPDATES):
        expected = worker.update()
        worker.put_in_place()
        assert worker.live.find_differing(worker.model, expected) == ()
    assert worker.live.uncompared == ()


@pytest.mark.parametrize(
    ("part", "layer"),
    [
        ("", None),
        ("embed_tokens", "embed_tokens.weight"),
        ("layers.1.", "layers.1"),
        ("layers.0.mlp.down_proj.weight", "layers.0"),
        ("layers.0.self_attn.q_proj.bias", "layers.0"),
        ("layers.1.self_attn.k_proj.bias", "layers.1"),
    ],
)
def test_weights_that_stayed_old_are_named_at_every_update_that_changes_them(
    worker: Worker, part: str, layer: str | None
) -> None:
    found, changes = 0, 0
    for _ in range(N_UPDATES):
        expected = worker.update()
        changes += any(part in name for name in worker.changed())
        worker.put_in_place(kept=lambda name: part in name)
        differing = worker.live.find_differing(worker.model, expected)
        found += bool(differing) if layer is None else differing == (layer,)
        worker.put_in_place()
    assert changes
    assert found == changes


def test_a_comparison_in_slices_finds_the_same(worker: Worker) -> None:
    expected = worker.update()
    worker.put_in_place(kept=lambda name: "layers.1." in name)
    comparison = worker.live.compare(worker.model, expected)
    n_slices = 1
    while not comparison.advance(1e-9):
        assert comparison.differing is None
        n_slices += 1
    assert n_slices > len(list(worker.model.parameters()))
    assert comparison.differing == worker.live.find_differing(worker.model, expected)
    assert comparison.differing == (
        ("layers.1",) if any("layers.1." in each for each in worker.changed()) else ()
    )


def test_swapped_layers_are_named(worker: Worker) -> None:
    expected = worker.update()
    worker.put_in_place()
    layers = worker.model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    assert worker.live.find_differing(worker.model, expected) == ("layers.0", "layers.1")


def test_a_packed_head_that_kept_the_old_embedding_is_named(worker: Worker) -> None:
    head, packed = worker.model.lm_head, worker.model.lm_head.weight.detach().clone()
    head.cpu_linear = lambda rows, weight, bias: nn.functional.linear(rows, packed)
    expected = worker.update()
    worker.put_in_place()
    assert worker.live.find_differing(worker.model, expected) == ("lm_head",)
    packed.copy_(head.weight.detach())
    assert worker.live.find_differing(worker.model, expected) == ()


def test_weights_that_are_packed_alone_are_read_through_their_kernel(worker: Worker) -> None:
    layer = worker.model.model.layers[0].mlp.down_proj
    packed = copy.deepcopy(layer.weight.detach())
    layer.input_size, layer.weight = packed.shape[1], nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    layer.cpu_linear = lambda rows, weight, bias: nn.functional.linear(rows, packed)
    worker.live.note_start(worker.model)
    expected = worker.update()
    name = "model.layers.0.mlp.down_proj.weight"
    worker.put_in_place(kept=lambda each: each == name)
    assert worker.live.uncompared == ()
    assert worker.live.find_differing(worker.model, expected) == ("layers.0",)
    packed.copy_(worker.weights[name])
    assert worker.live.find_differing(worker.model, expected) == ()


def test_layers_that_cannot_be_read_are_reported_and_left_out(worker: Worker, tmp_path: Path) -> None:
    with torch.no_grad():
        worker.model.model.layers[1].mlp.up_proj.weight += 1.0
    live = LiveWeights(SimpleNamespace(model=worker.live._folder, dtype=torch.bfloat16))
    live.note_start(worker.model)
    worker.live = live
    expected = worker.update()
    assert live.uncompared == ("layers.1",)
    worker.put_in_place(kept=lambda name: "layers.1" in name)
    assert live.find_differing(worker.model, expected) == ()
    nowhere = LiveWeights(SimpleNamespace(model=str(tmp_path / "hub" / "name"), dtype=torch.bfloat16))
    nowhere.note_start(worker.model)
    nowhere.expect([])
    assert nowhere.uncompared == ("embed_tokens.weight", "layers.0", "layers.1", "norm.weight")


def test_a_sum_depends_on_every_value_and_not_on_their_order_or_the_sign_of_zero() -> None:
    values = torch.tensor([1.0, 2.0, 0.0, -3.0])
    assert sum_words(values) == sum_words(values.flip(0)) == sum_words(torch.tensor([1.0, 2.0, -0.0, -3.0]))
    assert sum_words(torch.zeros(3)) == 0
    for changed in (
        values.bfloat16(),
        values * 1.0000002,
        values.clone().index_fill_(0, torch.tensor([2]), 1e-30),
    ):
        assert sum_words(changed) != sum_words(values)
