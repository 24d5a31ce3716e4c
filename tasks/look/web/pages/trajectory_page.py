"""The pages of one trajectory (outcome, conversation, coloured tokens) and of two next to each other."""

import math
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.segment_views import list_segment_views
from rollmill.tasks.look.tables.trajectory_record import ANNOTATED, TrajectoryRecord, find_trajectory
from rollmill.tasks.look.tables.view import count_noun, escape_controls
from rollmill.tasks.look.terminal.trajectory_print import (
    SHOWN_CHARACTERS,
    list_facts,
    message_heading,
    message_texts,
)
from rollmill.tasks.look.terminal.trajectory_tokens import (
    TokenTexts,
    list_tokens,
    mark_whitespace,
    parse_measure,
    token_scale,
)
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.look.web.urls import TRAJECTORIES, trajectory_url
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.folders import RunFolder

MOST_TOKENS = 100_000
"""Most tokens of one trajectory sent to a page."""
MOST_CHARACTERS = 500_000
"""Most characters of a text in the page; the download has all of it."""
NAMES = {
    "logprob": "log-probability (nats)",
    "advantage": "advantage",
    "entropy": "entropy (nats), the trainer's",
    "ratio": "ratio of the policy to the old one, the trainer's",
}


def make_token_data(
    folder: RunFolder, found: TrajectoryRecord, tokenizer: TokenTexts | None
) -> dict[str, Any]:
    """Return a trajectory's tokens and their values, as JSON for the script that colours them in the browser.

    Keys: text, id, version ([T]), values ({measure: [T], null for tokens that were not sampled}), plain ({name: [T]} shown next
    to a token), scales ({measure: [[number, colour], ...]}), names ({measure: its name}), n (number of tokens), heads ({index of a
    segment's first own token: its heading}, empty for one segment).
    """
    tokens = list_tokens(found, tokenizer)
    shown = tokens[:MOST_TOKENS]
    values: dict[str, list[float | None]] = {"logprob": [token.logprob for token in shown]}
    if found.token_advantages:
        values["advantage"] = [found.token_advantages[token.index] for token in shown]
    annotated = {
        name: [
            float(column[token.index]) if token.is_sampled and not math.isnan(column[token.index]) else None
            for token in shown
        ]
        for name in ANNOTATED
        if (column := found.annotations.get(name))
    }
    values |= {name: annotated.pop(name) for name in ("entropy", "ratio") if name in annotated}
    return {
        "text": [f"[{each.id}]" if each.text is None else mark_whitespace(each.text) for each in shown],
        "id": [token.id for token in shown],
        "version": [token.version for token in shown],
        "values": values,
        # Values without a colour scale; the sampler's log-probability has a name already.
        "plain": {
            "trainer's logprob" if name == "logprobs" else name: column for name, column in annotated.items()
        },
        "scales": {name: list(token_scale(folder, found, parse_measure(name)).stops) for name in values},
        "names": {name: NAMES[name] for name in values},
        "n": len(tokens),
        "heads": {each.start: each.heading for each in list_segment_views(found.row) if each.heading},
    }


def render_trajectory(source: RunData, short: str, by: str) -> Component:
    """Render the page of one trajectory; raises ConfigError, which lists similar ids, if the run has no such trajectory."""
    found = find_trajectory(source.folder, short)
    return html.Section(
        [
            html.H1(["trajectory ", html.Code(found.short)]),
            html.Nav(_neighbour_links(source, found), className="around"),
            html.Div(_render_record(found), className="two"),
            *_render_tokens(source, found, by),
        ]
    )


def render_pair(source: RunData, first: str, second: str) -> Component:
    """Render two trajectories next to each other."""
    columns = []
    for folder, short in (source.find_folder(asked) for asked in (first, second)):
        found = find_trajectory(folder, short)
        title = f"trajectory {found.short}"
        # Only the pages of the first run are served.
        is_first = folder == source.folder
        head = html.H2(
            dcc.Link(title, href=trajectory_url(found.short)) if is_first else f"{folder.name}: {title}"
        )
        columns.append(html.Div([head, *_render_record(found)]))
    return html.Section([html.H1("side by side"), html.Div(columns, className="pair")])


def _render_record(found: TrajectoryRecord) -> list[Component]:
    """Render a trajectory's status, reward and other facts, and its conversation."""
    rows: list[Component] = []
    for name, value in list_facts(found):
        rows += [html.Dt(name), html.Dd(_cut_long(value))]
    shown: list[Component] = []
    for segment in list_segment_views(found.row):
        shown += [html.H3(segment.heading, className="segment")] if segment.heading else []
        for message in segment.messages:
            # The role becomes a class of the style sheet, and a data set may have any text there.
            role = message["role"] if message["role"] in ("system", "user", "assistant", "tool") else "other"
            texts = [_render_text(text, "call" if style else "") for text, style in message_texts(message)]
            heading = html.H3(message_heading(message))
            shown.append(html.Article([heading, *texts], className=f"message {role}"))
    shown = shown or [html.P("Nothing was said.", className="quiet")]
    return [html.Dl(rows, className="facts"), html.Div(shown, className="conversation")]


def _render_text(text: str, kind: str) -> Component:
    """Render a text with visible control characters; the rest of a long text opens by a click."""
    first = html.Pre(escape_controls(text[:SHOWN_CHARACTERS]), className=kind)
    if len(text) <= SHOWN_CHARACTERS:
        return first
    rest = text[SHOWN_CHARACTERS:MOST_CHARACTERS]
    left = len(text) - SHOWN_CHARACTERS - len(rest)
    summary = f"show more: {count_noun(len(rest), 'character')} of {len(text):,} in all"
    more: list[Component] = [html.Summary(summary), html.Pre(escape_controls(rest), className=kind)]
    if left:
        note = f"{left:,} more characters are in the file that can be downloaded above."
        more.append(html.P(note, className="quiet"))
    return html.Div([first, html.Details(more)])


def _cut_long(text: str) -> str:
    more = f" … {len(text) - SHOWN_CHARACTERS:,} more characters" if len(text) > SHOWN_CHARACTERS else ""
    return f"{escape_controls(text[:SHOWN_CHARACTERS])}{more}"


def _neighbour_links(source: RunData, found: TrajectoryRecord) -> list[Component]:
    """Return links to the trajectory's group, the other samples of the group, its step, and its JSON download."""
    file = html.A("download (JSON)", href=f"/download{trajectory_url(found.short)}.json")
    if found.is_held_out:
        return [file]
    group, step = found.row["group"], found.row["step"]
    rows = source.shelf.rows("rollouts", ["group", "sample", "trajectory_id"], step=step)
    ids = rows.filter(pl.col("group") == group).sort("sample", maintain_order=True)["trajectory_id"]
    own = [
        html.B(each) if each == found.short else dcc.Link(each, href=trajectory_url(each))
        for each in map(short_id, ids)
    ]
    of_group = dcc.Link(f"group {group}", href=f"{TRAJECTORIES}?group={group}")
    return [of_group, *own, dcc.Link(f"step {step}", href=f"{TRAJECTORIES}?step={step}"), file]


def _render_tokens(source: RunData, found: TrajectoryRecord, by: str) -> list[Component]:
    title = html.H2("tokens")
    if not found.row["token_ids"]:
        return [title, html.P("Nothing was sampled.", className="quiet")]
    notes: list[Component] = []
    try:
        tokenizer = source.tokenizer(source.folder)
    except ConfigError as error:
        # Ids and values are readable without it.
        tokenizer, why = None, escape_controls(str(error))
        notes.append(html.P(f"Tokens are shown without their text: {why}", className="quiet"))
    data = make_token_data(source.folder, found, tokenizer)
    if data["n"] > len(data["text"]):
        notes.append(html.P(f"The first {len(data['text']):,} of {data['n']:,} tokens.", className="quiet"))
    names = data["names"]
    choice = dcc.RadioItems(
        id="by",
        options=[{"label": name, "value": name} for name in names],
        value=by if by in names else "logprob",
        inline=True,
        className="by",
    )
    return [
        html.Div([title, choice, html.Span(id="legend", className="legend")], className="head"),
        *notes,
        dcc.Store(id="tokens", data=data),
        html.Div(id="painted", className="tokens", tabIndex=0, role="group"),
        html.Div(id="token-details", className="details", role="status"),
    ]
