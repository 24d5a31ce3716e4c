"""Restrict who may call the viewer, and what its pages may load.

The viewer listens on loopback only, but other users of the machine reach loopback too, and a page of another site in a local browser
could call it. So a request needs the token of the printed address, or the cookie that this address sets. Links from other sites
may open pages, and nothing else.
"""

import hashlib
import hmac
import os
import secrets
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

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

TOKEN = "token"
"""Parameter of the printed address that has the access token."""
TOKEN_FILE = Path(".rollmill/view/token")
"""The access token of the viewers that are started in this folder; a browser's cookie is valid for later viewers, too."""
FIRST_PAGE = TOKEN_FILE.with_name("open.html")
N_TOKEN_BYTES = 32
COOKIE_LASTS_S = 400 * 24 * 3600

# A browser sends the cookie only with what this server's own pages request. A link on a page of another site, such as Prefect
# Cloud's, comes without; this page then requests the same address once more.
REFUSAL = """<!DOCTYPE html>
<html lang="en"><head><title>Rollmill</title>{again}</head>
<body><p>This viewer needs its token. Open the address that <code>rollmill view</code> printed, once in each browser.</p></body></html>
"""
AGAIN = '<meta http-equiv="refresh" content="0">'
OPENING = """<!DOCTYPE html>
<html lang="en"><head><title>Rollmill</title><meta http-equiv="refresh" content="0; url={address}"></head>
<body><a href="{address}">the viewer</a></body></html>
"""


def read_token(file: Path) -> str:
    """Return the access token that `file` has, which only this user can read; make one if there is none.

    Raises:
        OSError: the token cannot be stored.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.chmod(0o700)
    with suppress(FileNotFoundError):
        return _read_private(file)
    descriptor, unfinished = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w") as writing:
        writing.write(secrets.token_urlsafe(N_TOKEN_BYTES))
    # Of two viewers that start at the same time, both take the token of the first.
    with suppress(FileExistsError):
        os.link(unfinished, file)
    Path(unfinished).unlink()
    return _read_private(file)


def write_first_page(file: Path, address: str) -> str:
    """Write a page that only this user can read and that opens `address`; return its own address.

    A browser gets its address as an argument, which all users of the machine can read; so that argument must not have the token.
    """
    with os.fdopen(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w"
    ) as writing:
        writing.write(OPENING.format(address=address))
    return file.resolve().as_uri()


def install_guard(server: Flask, script_hashes: Sequence[str], token: str) -> None:
    """Make the server refuse requests without the token, of other sites, and malformed ones.

    It also sends headers that let pages load only its own files.
    """
    policy = _policy(script_hashes)
    # Cookies are shared by all ports of a host: the name differs by token, so that viewers of two projects keep theirs.
    cookie = f"rollmill-view-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    @server.before_request
    def refuse() -> Response | None:
        if reason := check_request(request):
            abort(Response(f"{reason}\n", 403, mimetype="text/plain"))
        if _is_same(request.args.get(TOKEN, ""), token):
            answer = Response(status=303, headers={"Location": _without_token(request.url)})
            answer.set_cookie(cookie, token, COOKIE_LASTS_S, httponly=True, samesite="Strict")
            return answer
        if _is_same(request.cookies.get(cookie, ""), token):
            return None
        is_link = request.headers.get("Sec-Fetch-Mode") == "navigate"
        is_foreign = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        return Response(
            REFUSAL.format(again=AGAIN if is_link and is_foreign else ""), 403, mimetype="text/html"
        )

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


def _is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _without_token(url: str) -> str:
    parts = urlsplit(url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != TOKEN]
    return parts._replace(query=urlencode(query)).geturl()


def _read_private(file: Path) -> str:
    """Return the text of a file; it counts as missing if it is empty, of another user, or others may read it."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW)) as reading:
        found = os.fstat(reading.fileno())
        if found.st_uid == os.getuid() and not found.st_mode & 0o077 and (token := reading.read().strip()):
            return token
    file.unlink()
    raise FileNotFoundError(file)


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
