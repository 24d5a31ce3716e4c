"""The longest prompt of an episode, and what becomes of a longer one."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from rollmill.tasks.errors import LongPromptError
from rollmill.tasks.rollout.config import RolloutConfig


@dataclass(slots=True)
class PromptLimit:
    """Largest number of tokens of an episode's opening: the messages before the policy's first one.

    Attributes:
        max_tokens: the number.
        setting: the setting that gives it, with its value, for errors.
        keeps_end: True: the last tokens of a longer opening are used; False: it fails.
        n_cut: openings that were cut so far, one for each trajectory.
    """

    max_tokens: int
    setting: str
    keeps_end: bool = False
    n_cut: int = 0

    @classmethod
    def from_config(cls, config: RolloutConfig, max_model_len: int) -> Self:
        """Read the limit from the settings."""
        if config.max_prompt_tokens:
            setting = f"rollout.max_prompt_tokens = {config.max_prompt_tokens}"
            return cls(config.max_prompt_tokens, setting, config.long_prompts == "keep_end")
        return cls.below(max_model_len)

    @classmethod
    def below(cls, max_model_len: int) -> Self:
        """Make the limit that leaves room for one token in a sequence of `max_model_len` tokens."""
        return cls(max_model_len - 1, f"serve.max_model_len = {max_model_len}")

    @property
    def kept_tokens(self) -> int:
        """Number of last tokens that are used of a longer opening; 0: it fails."""
        return self.max_tokens if self.keeps_end else 0

    def fit(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the [T] int32 tokens of an opening, or the last of them if there are too many.

        Raises:
            LongPromptError: it has too many, and the end is not kept.
        """
        if len(token_ids) <= self.max_tokens:
            return token_ids
        if not self.keeps_end:
            raise LongPromptError(
                f"the opening has {len(token_ids)} tokens, and may have {self.max_tokens} ({self.setting})"
            )
        self.n_cut += 1
        return token_ids[-self.max_tokens :]
