"""README.md of an exported policy: a model card as Hugging Face reads it, made of the policy's lineage."""

from typing import Any

import yaml

from rollmill.tasks.store.lineage.policy_lineage import LINEAGE, Lineage
from rollmill.tasks.store.model_folders import is_hub_name
from rollmill.tasks.store.run.immutable_settings import get_setting

# Settings in the card; lineage.json has all.
_SHOWN = ("seed", "train.loss", "score.advantage", "train.lr", "train.kl.coef", "rollout.group_size")


def format_card(lineage: Lineage) -> str:
    """Return the text of a model card: YAML front matter, and a table of what made the policy."""
    model = str(lineage.settings.get("model") or "")
    hub_data = [each.source for each in lineage.data if is_hub_name(each.source)]
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rollmill", "reinforcement-learning"],
    }
    # The hub accepts names of models and data sets there, and no folders.
    front |= {"base_model": model} if is_hub_name(model) else {}
    front |= {"datasets": hub_data} if hub_data else {}
    # A run with further sources may train on its own rollouts too.
    is_retrained = bool(get_setting(lineage.settings, "retrain.sources", ()))
    own = [] if lineage.sources and is_retrained else ["the run itself"]
    n_rows = sum(step.n_rows for step in lineage.steps)
    rows = {
        "run": f"`{lineage.run}`, in `{lineage.folder}`",
        "policy version": str(lineage.version),
        "start model": f"`{model or lineage.start_model.folder}`",
        "trained on": f"{n_rows} trajectories in {len(lineage.steps)} steps",
        "rollouts of": ", ".join([*own, *(f"`{each.folder}`" for each in lineage.sources)]),
        "forked from": ", ".join(f"`{each.folder}` at step {each.step}" for each in lineage.origins),
        "scorers": ", ".join(f"`{each}`" for each in lineage.scorers),
        "data": "; ".join(
            f"{each.env}: `{each.source}`, licence {each.license or 'not stated'}" for each in lineage.data
        ),
        "settings": ", ".join(f"`{name}={get_setting(lineage.settings, name, '')}`" for name in _SHOWN),
        "code": ", ".join(f"{name} {each}" for name, each in lineage.versions.items()),
        "commit": f"`{lineage.git_commit}`" if lineage.git_commit else "",
    }
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value)
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n"
        f"# Version {lineage.version} of {_cell(lineage.folder.rpartition('/')[2])}\n\n"
        "A language model, post-trained by reinforcement learning with Rollmill.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"`{LINEAGE}` has all settings, and the digests of every file, batch and trajectory. In this folder,\n"
        "`rollmill lineage .` lists the trajectories and checks all of them.\n"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
