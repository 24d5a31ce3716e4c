"""The network interface by which machines reach each other."""

import socket
from typing import Any

import psutil

GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of the network interface at which gloo listens."""


def find_interface(host: str, port: int) -> str:
    """Return the name of this machine's network interface by which it and `host` reach each other; nothing is sent.

    If `host` is this machine, it is the interface with that address.

    Raises:
        OSError: `host` has no address, or there is no route to it.
    """
    family, kind, _, _, destination = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # For datagrams this chooses a route and an own address, no more.
        probe.connect(destination)
        address = probe.getsockname()[0]
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, every in interfaces.items():
        if any(each.address.partition("%")[0] == address for each in every):
            return name
    raise OSError(f"no network interface has the address {address}")
