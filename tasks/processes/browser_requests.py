"""Which requests to a local server come from pages of other sites, by the headers that a page cannot choose."""

from collections.abc import Mapping
from urllib.parse import urlsplit

# Any port: a tunnel (ssh -L) may give the server another one.
NAMES = ("127.0.0.1", "localhost")


def find_refusal(server: str, method: str, headers: Mapping[str, str]) -> str:
    """Return why a request to a server on loopback is refused; empty if it is allowed.

    A page whose own name resolves to 127.0.0.1 (DNS rebinding) sends that name as Host. A page of another site is named by Origin or
    Sec-Fetch-Site. Programs send neither, and are allowed.

    Args:
        server: what the reason calls the server, such as "this viewer".
        method: of the request; empty for a WebSocket.
        headers: by lower-case name.
    """
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname
        origin = urlsplit(headers["origin"]).netloc if "origin" in headers else host
    except ValueError:
        name = origin = None
    if name not in NAMES:
        return f"{server} answers at {' and '.join(NAMES)} only"
    # Browsers mark what a click on a link opens; a script, an image or a frame of another site has another mode or destination.
    is_document = headers.get("sec-fetch-dest", "document") == "document"
    is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate" and is_document
    is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_link
    return f"{server} accepts requests only from its own pages" if origin != host or is_foreign else ""
