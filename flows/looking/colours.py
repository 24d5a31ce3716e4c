"""Colours of tokens in a terminal: a diverging scale for advantages, a sequential one for log-probabilities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.style import Style
from rich.text import Text

BRIGHT = 140
"""Luminance, 0 to 255, from which on a background takes black text."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Colours along numbers.

    Attributes:
        stops: (number, colour) in rising order; what lies beyond an end has the end's colour.
        form: how a number of the legend is written.

    Example: of Scale((0.0, "#000000"), (1.0, "#ffffff")) 0.5 is a mid gray.
    """

    stops: Sequence[tuple[float, str]]
    form: str = "{:g}"

    def style(self, value: float) -> Style:
        """How a token of this value is written; dim for NaN, which is what nobody sampled."""
        if math.isnan(value):
            return Style(dim=True)
        background = self._colour(value)
        luminance = 0.299 * background.red + 0.587 * background.green + 0.114 * background.blue
        text = "#000000" if luminance >= BRIGHT else "#ffffff"
        return Style(color=text, bgcolor=Color.from_triplet(background))

    def legend(self, title: str) -> Text:
        """The scale's colours with their numbers, on one line."""
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
    ((-5.0, "#7f2704"), (-3.0, "#d94801"), (-1.5, "#fd8d3c"), (-0.5, "#fdd0a2"), (0.0, "#fff5eb")), "{:g}"
)
"""Nats: the darker, the less likely the token was."""

ENTROPY = Scale(
    ((0.0, "#f7fcf5"), (0.5, "#c7e9c0"), (1.5, "#74c476"), (3.0, "#238b45"), (5.0, "#00441b")), "{:g}"
)
"""Nats: the darker, the more open the choice was."""

RATIO = Scale(
    ((0.5, "#b2182b"), (0.8, "#f4a582"), (1.0, "#f7f7f7"), (1.25, "#92c5de"), (2.0, "#2166ac")), "{:g}"
)
"""Red where the policy has grown less likely to choose the token, blue where more."""


def advantage_scale(largest: float) -> Scale:
    """Red below 0, blue above; `largest`, of either sign, has the full colour."""
    end = abs(largest) or 1.0
    colours = ("#b2182b", "#f4a582", "#f7f7f7", "#92c5de", "#2166ac")
    return Scale(tuple(zip((-end, -end / 2, 0.0, end / 2, end), colours, strict=True)), "{:+.2g}")
