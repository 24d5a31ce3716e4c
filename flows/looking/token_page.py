"""The tokens of a trajectory, coloured by advantage or log-probability; as a table where there are no colours."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import polars as pl
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from flows.config import RunConfig
from flows.looking.colours import ENTROPY, LOGPROB, RATIO, Scale, advantage_scale
from flows.looking.found import Found
from flows.looking.terminal import has_colours, print_view
from flows.looking.view import Column, View, visible, without_alike
from flows.recipe import start_model_folder
from tasks.errors import ConfigError
from tasks.rollout.tokens import ChatTokenizer
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.reader import scan

Measure: TypeAlias = Literal["advantage", "logprob", "entropy", "ratio"]
_UNITS: dict[Measure, str] = {
    "logprob": " (nats)",
    "advantage": ", of the whole trajectory",
    "entropy": " (nats)",
    "ratio": ", of the policy to the old one",
}


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a trajectory.

    Attributes:
        index: into token_ids.
        text: what it adds to the text; None without a tokenizer.
        is_sampled: True when the policy sampled it.
        logprob: nats; None where nobody sampled it.
        version: policy version that sampled it; None where nobody did.
    """

    index: int
    id: int
    text: str | None
    is_sampled: bool
    logprob: float | None
    version: int | None


def tokens_of(found: Found, tokenizer: ChatTokenizer | None) -> list[Token]:
    """A trajectory's tokens in order.

    Example: `47+38=` answered by `85` has ten tokens by character, the last three sampled, the end among them.
    """
    row = found.row
    spans = dict(zip(row["version_span_starts"], row["version_span_versions"], strict=True))
    version: int | None = None
    tokens = []
    ids = row["token_ids"]
    texts = [None] * len(ids) if tokenizer is None else tokenizer.pieces(ids)
    columns = (ids, texts, row["loss_mask"], row["logprobs"])
    for index, (id_, text, is_sampled, logprob) in enumerate(zip(*columns, strict=True)):
        version = spans.get(index, version)
        known = logprob if is_sampled and not math.isnan(logprob) else None
        tokens.append(Token(index, id_, text, is_sampled, known, version if is_sampled else None))
    return tokens


def run_tokenizer(folder: RunFolder, model: str = "") -> ChatTokenizer:
    """The tokenizer of a model folder, by default the one that the run began with.

    Raises:
        ConfigError: there is none; says how to name another.
    """
    place = Path(model) if model else None
    try:
        place = place or start_model_folder(RunConfig.model_validate(read_manifest(folder).config))
        return ChatTokenizer.load(place)
    except ConfigError as error:
        raise ConfigError("--model", str(place), f"{error.remedy}; name the run's model folder") from error
    except ValueError as error:
        remedy = "its settings are not of this Rollmill, so its model is not known; name the model folder"
        raise ConfigError("--model", folder.path("run.json"), remedy) from error


def print_tokens(console: Console, folder: RunFolder, found: Found, tokens: list[Token], by: Measure) -> None:
    """Print the tokens: coloured with a legend, or with their values where colours cannot be seen."""
    if by == "advantage" and found.advantage is None:
        raise ConfigError("--by", by, "no batch has this trajectory, so it has no advantage; give logprob")
    if by in ("entropy", "ratio") and by not in found.annotations:
        remedy = "the trainer has not annotated its tokens (train.annotate_every); give logprob or advantage"
        raise ConfigError("--by", by, remedy)
    console.print(Rule(Text(f"tokens by {by}", "bold"), align="left"))
    if not tokens:
        console.print("none: nothing was sampled")
        return
    if not has_colours(console) or tokens[0].text is None:
        print_view(_view(found, tokens, by))
        return
    scale = _scale(folder, found, by)
    text = Text()
    for token in tokens:
        text.append(_printed(token.text or ""), scale.style(_value(found, token, by)))
    console.print(scale.legend(f"{by}{_UNITS[by]}"))
    console.print(text)


def _scale(folder: RunFolder, found: Found, by: Measure) -> Scale:
    if by != "advantage":
        return {"logprob": LOGPROB, "entropy": ENTROPY, "ratio": RATIO}[by]
    batch = scan(folder, "batches", ["advantage"], step=found.row["step"]).select(
        pl.col("advantage").abs().max()
    )
    return advantage_scale(float(batch.collect().item() or 0.0))


def _value(found: Found, token: Token, by: Measure) -> float:
    """NaN where nobody sampled it."""
    if not token.is_sampled:
        return math.nan
    if by in ("entropy", "ratio"):
        return float(found.annotations[by][token.index])
    value = found.advantage if by == "advantage" else token.logprob
    return math.nan if value is None else value


def _printed(text: str) -> str:
    """A token's text with line ends and tabs that can be seen."""
    return visible(text.replace("\n", "⏎\n").replace("\t", "⇥\t"))


def _view(found: Found, tokens: list[Token], by: Measure) -> View:
    rows: list[dict[str, Any]] = [
        {
            "index": token.index,
            "id": token.id,
            "text": token.text and visible(repr(token.text)),
            by: _value(found, token, by),
            "version": token.version,
        }
        for token in tokens
    ]
    columns = [Column("index"), Column("id", rank=2), Column("text"), Column(by), Column("version", rank=1)]
    return View({}, "", without_alike(columns, rows, (), ("text",)), rows)


def measure(name: str) -> Measure:
    """What tokens are coloured by; empty: log-probability; ConfigError for anything else."""
    for each in get_args(Measure):
        if each == (name or "logprob"):
            return cast(Measure, each)
    raise ConfigError("--by", name, f"give {', '.join(get_args(Measure))}")
