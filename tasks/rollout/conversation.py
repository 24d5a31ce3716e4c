"""A whole conversation as token ids, joined exactly as an episode that is played joins its turns."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from tasks.rollout.environment import Message
from tasks.rollout.tokens import ChatTokenizer, Tools


def tokenized(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Tools = (), stop: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """([T] int32 token ids, [T] bool True on the policy's tokens) of a conversation that the policy ends.

    Example: "47+38=" and "85" give the ids of `47+38=85<eos>`, and True on the last three.
    """
    parts: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    done: tuple[Message, ...] = ()
    for is_policy, group in groupby(messages, key=lambda message: message.role == "assistant"):
        turn = tuple(group)
        if is_policy:
            part = tokenizer.encode_answer("".join(message.content for message in turn), stop)
        elif not done:
            part = tokenizer.encode(turn, tools)
        else:
            is_ended = int(parts[-1][-1]) in tokenizer.eos_ids
            part = tokenizer.encode_reply(done, turn, tools, is_ended=is_ended)
        parts.append(part)
        masks.append(np.full(len(part), is_policy))
        done += turn
    return np.concatenate(parts), np.concatenate(masks)
