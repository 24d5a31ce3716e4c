"""Starts a trainer's ranks on one machine, and ends them all when one ends; without a restart.

`python -m rollmill.tasks.train.service.rank_launcher NODES NODE RANKS HOST PORT ARGUMENTS...` starts RANKS ranks on each of NODES
machines, of which this is number NODE. Each rank runs this Python with ARGUMENTS and the environment variables of torchrun.

torchrun itself is not used: its stores listen at all addresses of the machine, and one of them unpickles what anybody writes there.
Here rank 0 serves the store at HOST alone, at a port that the launcher of node 0 opens for it.
"""

import os
import signal
import socket
import subprocess
import sys
import time

from rollmill.tasks.processes.machine import STORE_FD_ENV, listen_at
from rollmill.tasks.processes.network_interface import GLOO_INTERFACE_ENV, find_interface

# After SIGTERM; a rank that is in a collective does not react to it.
_GRACE_S = 5.0


def main() -> None:
    """Start the ranks of the command line, and exit with the status of the first that fails, or 0."""
    n_nodes, node, n_ranks, host, port, *arguments = sys.argv[1:]
    listener = _listen(host, int(port)) if node == "0" else None
    environment = {
        **os.environ,
        "WORLD_SIZE": str(int(n_nodes) * int(n_ranks)),
        "LOCAL_WORLD_SIZE": n_ranks,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(listener.getsockname()[1]) if listener else port,
        # Otherwise gloo listens at the address that this machine's name resolves to.
        GLOO_INTERFACE_ENV: os.environ.get(GLOO_INTERFACE_ENV) or find_interface(host, int(port)),
    }
    signal.signal(signal.SIGTERM, _exit)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank in range(int(n_ranks)):
            rank = int(node) * int(n_ranks) + local_rank
            names, fds = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}, []
            if listener and rank == 0:
                names[STORE_FD_ENV], fds = str(listener.fileno()), [listener.fileno()]
            ranks.append(
                subprocess.Popen([sys.executable, "-u", *arguments], env=environment | names, pass_fds=fds)
            )
        # Rank 0 holds the socket; with a second holder connections to it would hang after its end.
        if listener:
            listener.close()
        status = _wait(ranks)
    finally:
        _end(ranks)
    if status:
        local_rank = [each.returncode for each in ranks].index(status)
        how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        sys.stderr.write(f"trainer: rank {int(node) * int(n_ranks) + local_rank} ended with {how}\n")
    sys.exit(status if status >= 0 else 128 - status)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_at(host, port)
    except OSError as error:
        remedy = "give --rendezvous an address of node 0 and a free port"
        sys.exit(f"trainer: cannot listen at {host}:{port} ({error.strerror}): {remedy}")


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks have ended well or one has failed, and return 0 or its exit status."""
    while True:
        statuses = [each.poll() for each in ranks]
        if failed := next(filter(None, statuses), 0):
            return failed
        if None not in statuses:
            return 0
        # Until another one has ended; it is left for `poll` to read.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = [each for each in ranks if each.poll() is None]
        for each in alive:
            each.send_signal(number)
        deadline = time.monotonic() + _GRACE_S
        for each in alive:
            try:
                each.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
