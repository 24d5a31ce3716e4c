"""Machines of a test: processes of this machine with a separate network, host name, names of others and process ids.

Each is a network namespace behind one bridge, and a namespace of processes that ends as a whole.
"""

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

IN_NAMESPACE = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class Node:
    """A machine that runs one command, and starts it again whenever it ends, as a pod of Kubernetes does.

    Attributes:
        address: IPv4 address, which the other nodes and this process reach.
        log: output of all its starts.
    """

    def __init__(self, space: str, address: str, hosts: Path, log: Path) -> None:
        self._space, self.address, self._hosts, self.log = space, address, hosts, log
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._restarts: threading.Thread | None = None

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Keep a command running in a working folder until `stop`."""
        host = f"{self.log.stem}-host"
        network = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._space]
        processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        words = [*network, *processes, "sh", "-euc", IN_NAMESPACE, "sh"]

        def keep_running() -> None:
            while not self._stopping.is_set():
                with self.log.open("ab") as log:
                    self._process = subprocess.Popen(
                        [*words, host, str(self._hosts), *command],
                        env=environment,
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                self._process.wait()
                self._stopping.wait(1.0)

        self._restarts = threading.Thread(target=keep_running, daemon=True)
        self._restarts.start()

    def kill(self) -> None:
        """End every process of the machine at once, as a loss of power does."""
        assert self._process
        # When the first process of a namespace dies, the kernel ends all others, and only then reports its end.
        first = psutil.Process(self._process.pid).children()
        for each in first or [self._process]:
            each.kill()

    def stop(self) -> None:
        """End the machine; its processes are gone when this returns."""
        self._stopping.set()
        if self._process and self._restarts:
            with suppress(psutil.NoSuchProcess):
                self.kill()
            self._restarts.join()


@contextmanager
def network_nodes(
    names: Sequence[str], aliases: Mapping[str, Sequence[str]], folder: Path
) -> Iterator[list[Node]]:
    """Run nodes that find each other by name; an alias is a name with the addresses of several.

    The host name of a node is not its name, and resolves to loopback, as on Debian.

    Raises:
        OSError: there is no `ip` or `unshare`.
        subprocess.CalledProcessError: this user may not use them.
    """
    subnet, mark = f"10.214.{os.getpid() % 250}", f"rm{os.getpid() % 10**6}"
    addresses = {name: f"{subnet}.{number}" for number, name in enumerate(names, 2)}
    known = [
        *addresses.items(),
        *((alias, addresses[each]) for alias, every in aliases.items() for each in every),
    ]
    lines = [f"{address} {name}\n" for name, address in known]
    with ExitStack() as stack:
        run("unshare", "--pid", "--fork", "--mount-proc", "--uts", "true")
        run("ip", "link", "add", mark, "type", "bridge")
        stack.callback(run, "ip", "link", "del", mark)
        run("ip", "addr", "add", f"{subnet}.1/24", "dev", mark)
        run("ip", "link", "set", mark, "up")
        nodes = []
        for number, (name, address) in enumerate(addresses.items()):
            space, outer = f"{mark}n{number}", f"{mark}o{number}"
            run("ip", "netns", "add", space)
            stack.callback(run, "ip", "netns", "del", space)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", outer, "master", mark, "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", space, "link", "set", device, "up")
            hosts = folder / f"{name}.hosts"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}-host\n{''.join(lines)}")
            nodes.append(Node(space, address, hosts, folder / f"{name}.log"))
            stack.callback(nodes[-1].stop)
        yield nodes


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
