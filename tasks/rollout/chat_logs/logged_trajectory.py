"""A logged conversation as a trajectory: its tokens by the chat template of the model that is trained, without log-probabilities."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from rollmill.tasks.rollout.chat_logs.logged_conversation import LoggedConversation
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryBuilder, TrajectoryRequest

DIGEST = "digest"
"""Name, in the outcome of an imported trajectory, of the conversation's digest."""


def build_logged_trajectory(
    conversation: LoggedConversation,
    *,
    tokenizer: ChatTokenizer,
    stop: Sequence[str],
    temperature: float,
) -> Trajectory:
    """Return the trajectory of a conversation, which belongs to no run yet.

    All messages of role assistant count as sampled; their log-probabilities are NaN, and they belong to no policy version.

    Args:
        conversation: the conversation.
        tokenizer: of the model that is trained.
        stop: texts that end a turn of the policy like an end of sequence.
        temperature: at which training takes the messages to be sampled.

    Raises:
        EpisodeError: the chat template refuses the conversation.
    """
    example = Example(conversation.prompt_digest[:16], conversation.example)
    work = TrajectoryRequest("", 0, 0, 0, example, 0, temperature)
    is_cut = conversation.finish_reason == "length"
    builder = TrajectoryBuilder(
        work,
        server=conversation.model,
        started_at=conversation.started_at or datetime.now(UTC),
        outcome={
            DIGEST: conversation.digest,
            "source": conversation.source,
            **({"id": conversation.log_id} if conversation.log_id else {}),
        },
    )
    waiting: tuple[Message, ...] = ()
    for at, each in enumerate(conversation.messages):
        if each.role != "assistant":
            waiting += (each,)
            continue
        if builder.turns:
            builder.add_context(
                tokenizer.encode_reply(
                    builder.messages, waiting, conversation.tools, last_token=builder.last_token
                )
            )
        else:
            builder.add_context(tokenizer.encode(waiting, conversation.tools))
        builder.add_messages(waiting)
        waiting = ()
        text = tokenizer.write_turn(builder.messages, each, conversation.tools)
        # The last message of a conversation that was cut has no end of sequence.
        ends = (text,) if is_cut and at == len(conversation.messages) - 1 else stop
        ids = tokenizer.encode_answer(text, ends)
        builder.add_completion(ids, np.full(len(ids), np.nan), (), conversation.finish_reason, text)
    built = builder.build("truncated" if is_cut else "complete")
    return replace(built, duration_s=conversation.duration_s, generate_s=conversation.duration_s)


def place_in_group(trajectory: Trajectory, run: str, group: int, sample: int) -> Trajectory:
    """Return a trajectory as `sample` of a group of a run."""
    work = replace(trajectory.work, trajectory_id=f"{run}.{group}.{sample}.0", group=group, sample=sample)
    return replace(trajectory, work=work)
