"""A trajectory's tokens as the page paints them: texts, values to colour by, and the colours' scales."""

import math
from typing import Any

import polars as pl

from flows.looking.colours import ENTROPY, LOGPROB, RATIO, Scale, advantage_scale
from flows.looking.found import ANNOTATED, Found
from flows.looking.token_page import Token, tokens_of
from flows.looking.view import visible
from tasks.rollout.tokens import ChatTokenizer
from tasks.store.layout import RunFolder
from tasks.store.reader import scan

MOST_TOKENS = 100_000
"""Most tokens that a page is sent of one trajectory."""
NAMES = {
    "logprob": "log-probability (nats)",
    "advantage": "advantage, of the whole trajectory",
    "entropy": "entropy (nats), the trainer's",
    "ratio": "ratio of the policy to the old one, the trainer's",
}


def token_data(folder: RunFolder, found: Found, tokenizer: ChatTokenizer | None) -> dict[str, Any]:
    """What the page's script is given, as JSON values.

    Keys: text, id, version ([T]), values ({measure: [T], null where nobody sampled}), told ({name: [T]} shown beside
    a token), scales ({measure: [[number, colour], ...]}), names ({measure: its name}), n (all tokens).
    """
    tokens = tokens_of(found, tokenizer)
    shown = tokens[:MOST_TOKENS]
    values: dict[str, list[float | None]] = {"logprob": [token.logprob for token in shown]}
    if found.advantage is not None:
        values["advantage"] = [found.advantage if token.is_sampled else None for token in shown]
    annotated = {
        name: _numbers(found.annotations[name], shown) for name in ANNOTATED if name in found.annotations
    }
    values |= {name: annotated.pop(name) for name in ("entropy", "ratio") if name in annotated}
    scales = {name: _stops(_scale(folder, found, name)) for name in values}
    return {
        "text": [_printed(token) for token in shown],
        "id": [token.id for token in shown],
        "version": [token.version for token in shown],
        "values": values,
        "told": {
            "trainer's logprob" if name == "logprobs" else name: column for name, column in annotated.items()
        },
        "scales": scales,
        "names": {name: NAMES[name] for name in values},
        "n": len(tokens),
    }


def _printed(token: Token) -> str:
    """Its text, line ends and tabs with a mark; its id where the text is not known."""
    if token.text is None:
        return f"[{token.id}]"
    return visible(token.text).replace("\n", "⏎\n").replace("\t", "⇥\t")


def _numbers(column: list[Any], tokens: list[Token]) -> list[float | None]:
    """Values of the sampled tokens; None elsewhere, and where there is no number."""
    return [
        float(column[token.index]) if token.is_sampled and not math.isnan(column[token.index]) else None
        for token in tokens
    ]


def _scale(folder: RunFolder, found: Found, by: str) -> Scale:
    if by != "advantage":
        return {"logprob": LOGPROB, "entropy": ENTROPY, "ratio": RATIO}[by]
    batch = scan(folder, "batches", ["advantage"], step=found.row["step"])
    return advantage_scale(float(batch.select(pl.col("advantage").abs().max()).collect().item() or 0.0))


def _stops(scale: Scale) -> list[tuple[float, str]]:
    return [(number, colour) for number, colour in scale.stops]
