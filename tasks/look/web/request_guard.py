"""Restrict who may call the viewer, and what its pages may load.

The viewer listens on loopback only, but a page of another site in a local browser could still call it. Links from other sites may
open pages, and nothing else.
"""

from collections.abc import Sequence

from flask import Flask, Request, Response, abort, request

from rollmill.tasks.processes.browser_requests import find_refusal

LOOPBACK = "127.0.0.1"
CALLBACKS = "/_dash-update-component"
"""The only address that accepts POST requests: Dash callbacks, none of which writes."""


def install_guard(server: Flask, script_hashes: Sequence[str]) -> None:
    """Make the server refuse requests of other sites, and send headers that let its pages load only its own files."""
    policy = _policy(script_hashes)

    @server.before_request
    def refuse() -> None:
        if reason := check_request(request):
            abort(Response(f"{reason}\n", 403, mimetype="text/plain"))

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
