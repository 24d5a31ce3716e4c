"""Chooses the layout of a model's micro-batches: padded rows, or rows packed into one sequence."""

import inspect
import logging

import torch
from transformers import PreTrainedModel

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.private_transformers import carries_state, takes_attention
from rollmill.tasks.train.packing.layout_trial import LayoutTrial, compare_layouts, create_small_model
from rollmill.tasks.train.packing.packing_plan import Layout
from rollmill.tasks.train.packing.varlen import ATTENTION
from rollmill.tasks.train.rank_messages import all_gather_messages

_LOG = logging.getLogger(__name__)
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def choose_layout(model: PreTrainedModel, config: TrainConfig, device: torch.device) -> Layout:
    """Choose padded or varlen (packed) rows by `train.layout`; for varlen the model's attention is replaced.

    `auto` is varlen wherever the model and the machine support it: on CPU, where it was measured (docs/lab/performance.md) as
    quicker when rows share a prompt and as quick when they do not, and in bfloat16 on CUDA, whose kernel has no float32.

    varlen is tried against padded on a small model of the same architecture. Where it fails or gives other values, rows are padded, and
    the trainer's log says so. A collective.

    Raises:
        ConfigError: varlen is set, and the model or the machine does not support it.
    """
    obstacle = _obstacle(model, config, device)
    if not obstacle and config.layout != "padded":
        # The ranks divide one plan: all take the same layout, also where a trial fails on one of them.
        obstacle = next(filter(None, all_gather_messages(_try_varlen(model, device), str)), "")
        if obstacle:
            _LOG.warning("train.layout = %r: rows are padded, since %s", config.layout, obstacle)
    if config.layout == "varlen" and obstacle:
        raise ConfigError("train.layout", "varlen", f"{obstacle}; set it to padded")
    if config.layout == "padded" or obstacle:
        return "padded"
    # transformers finds an attention by its registered name, and passes the packed sequence to it.
    model.set_attn_implementation(ATTENTION)
    return "varlen"


def _obstacle(model: PreTrainedModel, config: TrainConfig, device: torch.device) -> str:
    """Return the reason why a model's rows cannot be packed into one sequence; empty if they can."""
    name, settings = type(model).__name__, model.config.get_text_config()
    if device.type == "cuda" and config.dtype == "float32":
        return "the kernel on CUDA has no float32"
    if not takes_attention(model):
        return f"{name} has a custom attention"
    if carries_state(model):
        return f"{name} is recurrent: its state would pass from one packed row to the next"
    if others := set(getattr(settings, "layer_types", None) or ()) - _KNOWN_LAYERS:
        return f"{name} has layers of {', '.join(sorted(others))}"
    if getattr(settings, "attn_logit_softcapping", None):
        return f"{name} caps the scores of its attention"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    return ""


def _try_varlen(model: PreTrainedModel, device: torch.device) -> str:
    """Compare the layouts on a small model of the same architecture; returns what is wrong with varlen, or an empty text."""
    trials = [(torch.device("cpu"), "float32")]
    if device.type == "cuda":
        trials.append((device, "bfloat16"))
    for where, dtype in trials:
        try:
            trial = _compare(model, where, dtype)
        except ConfigError as error:
            return error.remedy.removesuffix("; set it to padded")
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model's code raises of a small model or of packed rows
            return (
                f"the trial of packed rows of {type(model).__name__} failed ({type(error).__name__}: {error})"
            )
        if not trial.is_equal:
            text = f"{trial.logprobs:.2g} nats, in gradients by {trial.gradient:.2g}, on {where} in {dtype}"
            return f"packed rows of {type(model).__name__} differ from padded ones by {text}"
    return ""


def _compare(model: PreTrainedModel, device: torch.device, dtype: str) -> LayoutTrial:
    try:
        small = create_small_model(model.config, is_narrow=True)
    except Exception as error:  # noqa: BLE001 - a model's code may expect its own width
        _LOG.debug("%s cannot be narrow: %s", type(model).__name__, error)
        small = create_small_model(model.config, is_narrow=False)
    return compare_layouts(small, device, dtype)
