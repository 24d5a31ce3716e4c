"""One trajectory to read: what became of it, what was said, its tokens; or two of them side by side."""

from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from flows.looking.found import Found, find_trajectory
from flows.looking.show import facts, heading, said
from flows.looking.token_page import run_tokenizer
from flows.looking.view import counted, visible
from flows.viewer.address import TRAJECTORIES, trajectory_address
from flows.viewer.source import Source
from flows.viewer.tokens import token_data
from tasks.errors import ConfigError
from tasks.store.attempts import short_id

SHOWN_CHARACTERS = 20_000
"""Of a text at once; what follows is opened by a click."""
MOST_CHARACTERS = 500_000
"""Of a text in the page; all of it is in the file."""


def trajectory(source: Source, short: str, by: str) -> Component:
    """The page of one trajectory.

    Raises:
        ConfigError: the run has no such trajectory; names near ones.
    """
    found = find_trajectory(source.folder, short)
    return html.Section(
        [
            html.H1(["trajectory ", html.Code(found.short)]),
            html.Nav(_around(source, found), className="around"),
            html.Div(
                [_facts(found), html.Div(_conversation(found), className="conversation")], className="two"
            ),
            *_tokens(source, found, by),
        ]
    )


def beside(source: Source, first: str, second: str) -> Component:
    """Two trajectories side by side."""
    columns = []
    for short in (first, second):
        found = find_trajectory(source.folder, short)
        head = html.H2(dcc.Link(f"trajectory {found.short}", href=trajectory_address(found.short)))
        columns.append(
            html.Div([head, _facts(found), html.Div(_conversation(found), className="conversation")])
        )
    return html.Section([html.H1("side by side"), html.Div(columns, className="beside")])


def _facts(found: Found) -> Component:
    rows: list[Component] = []
    for name, value in facts(found):
        rows += [html.Dt(name), html.Dd(_cut(value))]
    return html.Dl(rows, className="facts")


def _conversation(found: Found) -> list[Component]:
    shown: list[Component] = []
    for message in found.row["messages"]:
        role = message["role"] if message["role"] in ("system", "user", "assistant", "tool") else "other"
        texts = [_text(text, "call" if style else "") for text, style in said(message)]
        shown.append(html.Article([html.H3(heading(message)), *texts], className=f"message {role}"))
    return shown or [html.P("Nothing was said.", className="quiet")]


def _text(text: str, kind: str) -> Component:
    """A text as it is, every character of it to be seen; of a long one the rest is opened by a click."""
    first = html.Pre(visible(text[:SHOWN_CHARACTERS]), className=kind)
    if len(text) <= SHOWN_CHARACTERS:
        return first
    rest = text[SHOWN_CHARACTERS:MOST_CHARACTERS]
    left = len(text) - SHOWN_CHARACTERS - len(rest)
    more: list[Component] = [
        html.Summary(f"show more: {counted(len(rest), 'character')} of {len(text):,} in all")
    ]
    more.append(html.Pre(visible(rest), className=kind))
    if left:
        more.append(
            html.P(
                f"{left:,} more characters are in the file that can be downloaded above.", className="quiet"
            )
        )
    return html.Div([first, html.Details(more)])


def _cut(text: str) -> str:
    more = f" … {len(text) - SHOWN_CHARACTERS:,} more characters" if len(text) > SHOWN_CHARACTERS else ""
    return f"{visible(text[:SHOWN_CHARACTERS])}{more}"


def _around(source: Source, found: Found) -> list[Component]:
    """Links: the others of its group, the table they are of, and the file of all that is known of it."""
    file = html.A("download (JSON)", href=f"/download{trajectory_address(found.short)}.json")
    if found.is_held_out:
        return [file]
    group, step = found.row["group"], found.row["step"]
    rows = source.shelf.rows("rollouts", ["group", "sample", "trajectory_id"], step=step)
    shorts = [
        short_id(each)
        for number, _, each in sorted(rows.iter_rows(), key=lambda row: (row[0], row[1]))
        if number == group
    ]
    own = [
        html.B(each) if each == found.short else dcc.Link(each, href=trajectory_address(each))
        for each in shorts
    ]
    links: list[Component] = [dcc.Link(f"group {group}", href=f"{TRAJECTORIES}?group={group}"), *own]
    links.append(dcc.Link(f"step {step}", href=f"{TRAJECTORIES}?step={step}"))
    return [*links, file]


def _tokens(source: Source, found: Found, by: str) -> list[Component]:
    title = html.H2("tokens")
    if not found.row["token_ids"]:
        return [title, html.P("Nothing was sampled.", className="quiet")]
    notes: list[Component] = []
    try:
        tokenizer = run_tokenizer(source.folder)
    except ConfigError as error:
        tokenizer = None
        notes.append(html.P(f"Tokens are shown without their text: {visible(str(error))}", className="quiet"))
    data: dict[str, Any] = token_data(source.folder, found, tokenizer)
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
        html.Div(id="token-told", className="told", role="status"),
    ]
