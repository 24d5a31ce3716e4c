"""Restrict who may call the viewer, and what its pages may load.

The viewer listens on loopback only, but a page of another site in a local browser could still call it. Links from other sites may
open pages, and nothing else.
"""

import traceback
from collections.abc import Sequence
from pathlib import Path

import typer
from flask import Flask, Request, Response, abort, request
from werkzeug.exceptions import HTTPException

from rollmill.tasks.errors import describe_error
from rollmill.tasks.look.tables.view import escape_controls
from rollmill.tasks.processes.browser_requests import find_refusal

LOOPBACK = "127.0.0.1"
CALLBACKS = "/_dash-update-component"
"""The only address that accepts POST requests: Dash callbacks, none of which writes."""

MOST_REASON = 200
"""Most characters shown of an error."""


def install_guard(server: Flask, script_hashes: Sequence[str]) -> None:
    """Make the server refuse requests of other sites and malformed ones, and send headers that let pages load only its own files."""
    policy = _policy(script_hashes)

    @server.before_request
    def refuse() -> None:
        if reason := check_request(request):
            abort(Response(f"{reason}\n", 403, mimetype="text/plain"))

    @server.errorhandler(Exception)
    def refuse_malformed(error: Exception) -> Response | HTTPException:
        """Answer 400, and print one line, if a callback raises: the page shows errors in what it reads without raising."""
        if isinstance(error, HTTPException):
            return error
        if request.path != CALLBACKS:
            raise error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind, text = describe_error(error)
        reason = escape_controls(f"{kind}: {' '.join(text[:MOST_REASON].split())}")
        typer.echo(f"a request failed: {reason} ({Path(frame.filename).name}:{frame.lineno})", err=True)
        return Response(f"the request is malformed: {reason}\n", 400, mimetype="text/plain")

    @server.after_request
    def restrict(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        return response


def check_request(asked: Request) -> str:
    """Return why a request is refused; empty if it is allowed."""
    if asked.method not in ("GET", "HEAD") and asked.path != CALLBACKS:
        return "this viewer changes nothing"
    headers = {name.lower(): value for name, value in asked.headers.items()}
    return find_refusal("this viewer", asked.method, headers)


def _policy(script_hashes: Sequence[str]) -> str:
    """Return the Content-Security-Policy header: only this server's scripts and inline ones with these hashes may run.

    Inline styles are allowed, because table and charts set styles at run time.
    """
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(["'self'", *script_hashes]),
        "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data:",
        "font-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {allowed}" for name, allowed in rules.items())
