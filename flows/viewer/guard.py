"""Who may ask the viewer, and what a page of it may do.

It listens on loopback alone. A page of another site that a browser on this machine has open is refused all the same:
by the Host header, which such a page cannot choose when it has its own name lead to 127.0.0.1 (DNS rebinding), and by
Origin and Sec-Fetch-Site, which say that it is another's. Links from elsewhere open pages; they do nothing else.
"""

from collections.abc import Sequence

from flask import Flask, Request, Response, abort, request

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")
CALLBACKS = "/_dash-update-component"
"""The one address that takes POST requests: what a page asks for; nothing there writes."""


def guard(server: Flask, port: int, script_hashes: Sequence[str]) -> None:
    """Refuse requests of other sites, and send with each answer what its page may load: nothing from elsewhere."""
    hosts = {f"{name}:{port}" for name in NAMES}
    policy = _policy(script_hashes)

    @server.before_request
    def refuse() -> None:
        if reason := refusal(request, hosts):
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


def refusal(asked: Request, hosts: set[str]) -> str:
    """Why a request is refused; empty: it is not."""
    if asked.host not in hosts:
        return f"this viewer answers at {' and '.join(sorted(hosts))} alone"
    if asked.method not in ("GET", "HEAD") and asked.path != CALLBACKS:
        return "this viewer changes nothing"
    origin = asked.headers.get("Origin")
    if origin is not None and origin not in {f"http://{host}" for host in hosts}:
        return "this viewer answers to its own pages alone"
    site = asked.headers.get("Sec-Fetch-Site", "none")
    is_link = asked.method == "GET" and asked.headers.get("Sec-Fetch-Mode") == "navigate"
    if site not in ("none", "same-origin") and not is_link:
        return "this viewer answers to its own pages alone"
    return ""


def _policy(script_hashes: Sequence[str]) -> str:
    """Styles are set by the table and the charts at run time; scripts are files of this server and Dash's own lines."""
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
