"""A Hugging Face folder from a checkpoint, without a trainer: `python -m tasks.train.export_checkpoint CONFIG.json`."""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tasks.config import StageConfig
from tasks.errors import StoreError
from tasks.store.checkpoint_files import check_bytes, read_marker
from tasks.store.layout import CHECKPOINT_MARKER
from tasks.train.checkpoints import read_progress
from tasks.train.config import TrainConfig
from tasks.train.lora import add_adapters
from tasks.train.policy import load_policy
from tasks.train.state import WEIGHT
from tasks.train.state_files import StateFiles, check_parameters
from tasks.train.weights import export_policy


class ExportConfig(StageConfig):
    """What to export, to where.

    Attributes:
        train: the run's settings of the trainer.
        model: folder of the run's start model, whose tokenizer goes with the weights.
        run: random id of the run.
        version: of the checkpoint.
        checkpoint: its folder on this machine.
        output: the new folder; it appears whole.
    """

    train: TrainConfig
    model: str
    run: str
    version: int
    checkpoint: str
    output: str


def main() -> None:
    """Export."""
    config = ExportConfig.model_validate_json(Path(sys.argv[1]).read_text())
    torch.set_num_threads(config.train.threads)
    try:
        folder = Path(config.checkpoint)
        read_progress(folder, config.run, config.version)
        marker = folder / CHECKPOINT_MARKER
        check_bytes(folder, read_marker(marker.read_bytes(), str(marker)).files or {})
        model = stored_policy(config)
    except StoreError as error:
        sys.exit(str(error))
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        unfinished = Path(scratch) / "model"
        export_policy(model, str(unfinished), is_writer=True)
        unfinished.rename(output)


@torch.no_grad()
def stored_policy(config: ExportConfig) -> PreTrainedModel:
    """The start model with a checkpoint's weights.

    Raises:
        StoreError: the checkpoint is of another model, or damaged.
    """
    model = load_policy(config.model, config.train.dtype)
    if config.train.lora.rank:
        add_adapters(model, config.train.lora)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with StateFiles(Path(config.checkpoint)) as files:
        check_parameters(files.shapes, {name: tuple(each.shape) for name, each in trained.items()})
        for name, each in trained.items():
            each.copy_(files.read(WEIGHT, name, 0, each.numel()).view(each.shape))
    return model


if __name__ == "__main__":
    main()
