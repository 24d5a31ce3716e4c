"""With its adapters off a model is the one that they were added to, and afterwards it is as before."""

from pathlib import Path

import torch

from rollmill.tasks.train.config import LoraConfig
from rollmill.tasks.train.engine.lora import add_adapters
from rollmill.tasks.train.engine.policy_model import load_policy
from rollmill.tasks.train.engine.reference_policy import disable_adapters


@torch.no_grad()
def test_a_model_without_its_adapters_is_the_one_they_were_added_to(tiny_model: Path) -> None:
    tokens = torch.arange(2, 12)[None]
    expected = load_policy(str(tiny_model), "float32")(tokens).logits
    model = load_policy(str(tiny_model), "float32")
    add_adapters(model, LoraConfig(rank=2))
    for name, each in model.named_parameters():
        if ".lora_" in name:
            each.normal_()
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    adapted = model(tokens).logits
    with disable_adapters(model):
        torch.testing.assert_close(model(tokens).logits, expected)
    assert not torch.allclose(adapted, expected, atol=0.1)
    assert torch.equal(model(tokens).logits, adapted)
    assert {name for name, each in model.named_parameters() if each.requires_grad} == trained
