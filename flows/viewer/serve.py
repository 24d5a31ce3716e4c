"""The viewer's server: on loopback, of this process, until it is interrupted."""

import importlib
import logging
import socket
import threading
import webbrowser
from contextlib import suppress

import typer

from tasks.errors import ConfigError
from tasks.store.layout import RunFolder

PORT = 4300
"""Where the viewer is looked for, when nothing else is said."""
OTHER_PORTS = 20
"""As many ports after it are tried when it is taken."""


def serve(folder: RunFolder, port: int | None, refresh_s: float, *, opens_browser: bool) -> None:
    """Serve a run's pages until interrupted.

    Args:
        folder: the run.
        port: loopback port; None: PORT, or when that is taken the next one that is free.
        refresh_s: seconds between two looks for something new.
        opens_browser: True: the first page is opened in a browser, where there is one.

    Raises:
        ConfigError: the port is taken, or the viewer's packages are not installed.
    """
    try:
        from werkzeug.serving import make_server

        from flows.viewer.app import viewer
        from flows.viewer.guard import LOOPBACK
        from flows.viewer.source import Source
    except ModuleNotFoundError as error:
        remedy = f"the viewer needs {error.name}: pip install 'rollmill[viewer]'"
        raise ConfigError("view", folder.location, remedy) from error
    with suppress(ModuleNotFoundError):
        # Arrow imports it at its first conversion, in some thread, and Plotly looks into it when it is half imported.
        importlib.import_module("pandas")
    listener = listen(LOOPBACK, port)
    chosen = int(listener.getsockname()[1])
    if port is None and chosen != PORT:
        typer.echo(f"port {PORT} is taken, so it is {chosen}", err=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    source = Source(folder, fresh_s=refresh_s / 2)
    app = viewer(source, chosen, refresh_s)
    server = make_server(LOOPBACK, chosen, app.server, threaded=True, fd=listener.fileno())
    address = f"http://{LOOPBACK}:{chosen}/"
    typer.echo(f"{folder.location}: {address}  (Ctrl-C ends it)")
    threading.Thread(target=source.warm, name="viewer-warm", daemon=True).start()
    if opens_browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    with suppress(KeyboardInterrupt), server:
        server.serve_forever()


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: no such port is free.
    """
    for each in range(PORT, PORT + OTHER_PORTS) if port is None else [port]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, each))
            listener.listen()
        except OSError as error:
            listener.close()
            reason = error.strerror
            continue
        return listener
    asked = port if port is not None else f"{PORT} to {PORT + OTHER_PORTS - 1}"
    raise ConfigError(
        "--port", asked, f"the viewer cannot listen there ({reason}); give another, 0 is any free one"
    )
