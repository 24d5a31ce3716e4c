"""Torch's random generators of a rank: the CPU's, and its GPU's."""

from collections.abc import Callable, Mapping

import torch

_CPU, _GPU = "random/cpu", "random/gpu"
_FIRST_SEED = 0


def begin_random() -> None:
    """As a rank begins that has loaded nothing yet."""
    torch.manual_seed(_FIRST_SEED)


def random_state() -> dict[str, torch.Tensor]:
    """[bytes] of each generator, by its name in a checkpoint."""
    state = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_GPU] = torch.cuda.get_rng_state()
    return state


def restore_random(read: Callable[[str], torch.Tensor | None]) -> None:
    """Set every generator of which there is a state; `read` gives it by its name."""
    setters: Mapping[str, Callable[[torch.Tensor], None]] = {_CPU: torch.set_rng_state}
    if torch.cuda.is_available():
        setters = {**setters, _GPU: torch.cuda.set_rng_state}
    for name, set_state in setters.items():
        if (state := read(name)) is not None:
            set_state(state)
