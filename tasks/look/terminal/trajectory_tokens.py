"""Print the tokens of a trajectory, coloured on a diverging or sequential scale; as a table without colours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args

import polars as pl
from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.console import Console
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.segment_views import list_segment_views
from rollmill.tasks.look.tables.trajectory_record import TrajectoryRecord
from rollmill.tasks.look.tables.view import Column, View, drop_uniform, escape_controls
from rollmill.tasks.look.terminal.output import has_colours, print_view
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.segments import read_segments

BRIGHT = 140
"""Luminance (0 to 255) from which a background gets black text."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A colour scale that maps numbers to colours.

    Attributes:
        stops: (number, colour) in rising order; numbers beyond an end get that end's colour.
        form: format of a number in the legend.

    Example: with Scale((0.0, "#000000"), (1.0, "#ffffff")) 0.5 is a medium grey.
    """

    stops: Sequence[tuple[float, str]]
    form: str = "{:g}"

    def style(self, value: float) -> Style:
        """Return the style of a token with this value; dim for NaN, which marks tokens that were not sampled."""
        if math.isnan(value):
            return Style(dim=True)
        background = self._colour(value)
        # The weights of ITU-R BT.601: the eye sees green brightest.
        luminance = 0.299 * background.red + 0.587 * background.green + 0.114 * background.blue
        text = "#000000" if luminance >= BRIGHT else "#ffffff"
        return Style(color=text, bgcolor=Color.from_triplet(background))

    def legend(self, title: str) -> Text:
        """Return the scale's colours with their numbers, on one line."""
        line = Text(f"{title}  ")
        for value, _ in self.stops:
            line.append(f" {self.form.format(value)} ", self.style(value))
        return line.append("  not sampled", Style(dim=True))

    def _colour(self, value: float) -> ColorTriplet:
        (low, first), *others = self.stops
        colour = Color.parse(first).get_truecolor()
        for high, name in others:
            share = min(1.0, max(0.0, (value - low) / (high - low)))
            colour = blend_rgb(colour, Color.parse(name).get_truecolor(), share)
            if value <= high:
                break
            low = high
        return colour


LOGPROB = Scale(
    ((-5.0, "#7f2704"), (-3.0, "#d94801"), (-1.5, "#fd8d3c"), (-0.5, "#fdd0a2"), (0.0, "#fff5eb"))
)
"""Nats; darker means less likely."""

ENTROPY = Scale(((0.0, "#f7fcf5"), (0.5, "#c7e9c0"), (1.5, "#74c476"), (3.0, "#238b45"), (5.0, "#00441b")))
"""Nats; darker means higher entropy."""

RATIO = Scale(((0.5, "#b2182b"), (0.8, "#f4a582"), (1.0, "#f7f7f7"), (1.25, "#92c5de"), (2.0, "#2166ac")))
"""Red: the policy became less likely to choose the token; blue: more likely."""


def advantage_scale(largest: float) -> Scale:
    """Return a scale that is red below 0 and blue above; plus or minus `largest` gets the full colour."""
    end = abs(largest) or 1.0
    colours = ("#b2182b", "#f4a582", "#f7f7f7", "#92c5de", "#2166ac")
    return Scale(tuple(zip((-end, -end / 2, 0.0, end / 2, end), colours, strict=True)), "{:+z.2g}")


TokenMeasure: TypeAlias = Literal["advantage", "logprob", "entropy", "ratio"]
_UNITS: dict[TokenMeasure, str] = {
    "logprob": " (nats)",
    "advantage": "",
    "entropy": " (nats)",
    "ratio": ", of the policy to the old one",
}


class TokenTexts(Protocol):
    """Interface of a tokenizer that can give the text of each token."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds, special tokens included."""


LoadTokenizer: TypeAlias = Callable[[RunFolder], TokenTexts]
"""Loads the tokenizer of a run; raises ConfigError if it has none."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a trajectory.

    Attributes:
        index: index into token_ids.
        text: the text it adds; None without a tokenizer.
        is_sampled: True if the policy sampled it.
        logprob: nats; None if it was not sampled.
        version: policy version that sampled it; None if it was not sampled.
        segment: number of the segment that it is an own token of.
    """

    index: int
    id: int
    text: str | None
    is_sampled: bool
    logprob: float | None
    version: int | None
    segment: int = 0


def list_tokens(found: TrajectoryRecord, tokenizer: TokenTexts | None) -> list[Token]:
    """Return a trajectory's tokens in order.

    Example: `47+38=` answered by `85` has nine tokens by character and an end token; the last three are sampled.
    """
    row = found.row
    spans = dict(zip(row["version_span_starts"], row["version_span_versions"], strict=True))
    version: int | None = None
    tokens = []
    ids = row["token_ids"]
    starts = [each.start for each in read_segments(row)]
    texts: list[str | None] = []
    numbers: list[int] = []
    for number, (start, end) in enumerate(pairwise([*starts, len(ids)])):
        numbers += [number] * (end - start)
        texts += [None] * (end - start) if tokenizer is None else tokenizer.pieces(ids[start:end])
    columns = (ids, texts, row["loss_mask"], row["logprobs"], numbers)
    for index, (id_, text, is_sampled, logprob, number) in enumerate(zip(*columns, strict=True)):
        version = spans.get(index, version)
        # Tokens of the prompt have NaN, which JSON does not have.
        known = logprob if is_sampled and not math.isnan(logprob) else None
        tokens.append(Token(index, id_, text, is_sampled, known, version if is_sampled else None, number))
    return tokens


def check_has_values(found: TrajectoryRecord, by: TokenMeasure) -> None:
    """Raise ConfigError if a trajectory has no values of the measure `by`."""
    if by == "advantage" and found.advantage is None:
        raise ConfigError("--by", by, "no batch has this trajectory, so it has no advantage; give logprob")
    if by in ("entropy", "ratio") and by not in found.annotations:
        remedy = "the trainer has not annotated its tokens (train.annotate_every); give logprob or advantage"
        raise ConfigError("--by", by, remedy)


def print_tokens(
    console: Console, folder: RunFolder, found: TrajectoryRecord, tokens: list[Token], by: TokenMeasure
) -> None:
    """Print the tokens of a trajectory: coloured with a legend, or as a table of values without colours."""
    console.print(Rule(Text(f"tokens by {by}", "bold"), align="left"))
    if not tokens:
        console.print("none: nothing was sampled")
        return
    # Without a tokenizer there is no text to colour.
    if not has_colours(console) or tokens[0].text is None:
        print_view(_token_view(found, tokens, by))
        return
    scale = token_scale(folder, found, by)
    text, heads = Text(), {each.start: each.heading for each in list_segment_views(found.row)}
    for token in tokens:
        if heads.get(token.index):
            text.append(f"{'' if token.index == 0 else chr(10)}═ {heads[token.index]}\n", "bold")
        text.append(mark_whitespace(token.text or ""), scale.style(_token_value(found, token, by)))
    console.print(scale.legend(f"{by}{_UNITS[by]}"))
    console.print(text)


def token_scale(folder: RunFolder, found: TrajectoryRecord, by: TokenMeasure) -> Scale:
    """Return the colour scale of a measure; that of advantages ends at the largest one in the trajectory's batch."""
    if by != "advantage":
        return {"logprob": LOGPROB, "entropy": ENTROPY, "ratio": RATIO}[by]
    batch = scan(folder, "batches", ["advantage", "token_advantages"], step=found.row["step"])
    largest = pl.max_horizontal(
        pl.col("advantage").abs().max(), pl.col("token_advantages").explode().abs().max()
    )
    return advantage_scale(float(batch.select(largest).collect().item() or 0.0))


def _token_value(found: TrajectoryRecord, token: Token, by: TokenMeasure) -> float:
    """Return a token's value of the measure `by`; NaN if the token was not sampled."""
    if not token.is_sampled:
        return math.nan
    if by in ("entropy", "ratio"):
        return float(found.annotations[by][token.index])
    value = found.token_advantages[token.index] if by == "advantage" else token.logprob
    return math.nan if value is None else value


def mark_whitespace(text: str) -> str:
    """Return the text of a token with visible line ends, tabs and control characters."""
    return escape_controls(text.replace("\n", "⏎\n").replace("\t", "⇥\t"))


def _token_view(found: TrajectoryRecord, tokens: list[Token], by: TokenMeasure) -> View:
    rows: list[dict[str, Any]] = [
        {
            "index": token.index,
            "id": token.id,
            "text": token.text and escape_controls(repr(token.text)),
            by: _token_value(found, token, by),
            "version": token.version,
            "segment": token.segment,
        }
        for token in tokens
    ]
    columns = [Column("index"), Column("id", rank=2), Column("text"), Column(by), Column("version", rank=1)]
    if tokens[-1].segment:
        columns.insert(0, Column("segment"))
    return View({}, "", drop_uniform(columns, rows, (), ("text",)), rows)


def parse_measure(name: str) -> TokenMeasure:
    """Return the name of a token measure, `logprob` for an empty name; raise ConfigError for an unknown one."""
    for each in get_args(TokenMeasure):
        if each == (name or "logprob"):
            return cast(TokenMeasure, each)
    raise ConfigError("--by", name, f"give {', '.join(get_args(TokenMeasure))}")
