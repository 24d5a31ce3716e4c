"""docs/reference/algorithms.md is true: its loss is one, and every preset, loss and advantage is there with its settings."""

import re
from pathlib import Path

import pytest

from rollmill.flows.configuration.presets import ALGORITHMS
from rollmill.flows.configuration.settings import load
from rollmill.tasks.score.advantages import ADVANTAGES
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.objective.objective import LOSSES, build_loss

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md").read_text()


def test_the_loss_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "documented_losses.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))

    build_loss(TrainConfig(loss={"name": "documented_losses:soft_clip", "args": {"temperature": 2}}))


@pytest.mark.parametrize("name", sorted(path.stem for path in ALGORITHMS.glob("*.yaml")))
def test_a_preset_has_the_settings_of_the_table(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}`[^|]*\| (.*)$", PAGE, re.MULTILINE)[:1]
    config = load(f"quickstart+{name}", ("train.kl.model=models/teacher",) if name == "distill" else ())
    advantage, loss, normalization, more, _ = row.split("|")
    kl, divergence = (
        config.train.kl,
        re.search(
            r"divergence (k\d) from (the start model|a \[teacher]\S+) in the (loss|advantage), (\S+)", more
        ),
    )

    assert f"`{config.score.advantage}`" in advantage
    assert f"`{config.train.loss}`" in loss
    assert f"`{config.train.normalization}`" in normalization
    assert bool(divergence) == bool(kl.coef)
    if divergence:
        estimator, model, place, coef = divergence.groups()
        assert (kl.estimator, kl.coef) == (estimator, float(coef))
        assert (kl.apply_to, kl.reference, bool(kl.model)) == (place, "frozen", model != "the start model")


def test_every_loss_and_advantage_has_its_formula() -> None:
    for name in (*LOSSES, *ADVANTAGES):
        assert len(re.findall(rf"^\| `{name}` \|", PAGE, re.MULTILINE)) >= 1, name
