"""The links of each transport, by its name."""

from collections.abc import Callable, Mapping

from tasks.errors import SyncError
from tasks.sync.gloo_link import GlooReceiver, GlooSender
from tasks.sync.link import Meeting, ReceivingLink, SendingLink
from tasks.sync.nccl_link import NcclReceiver, NcclSender
from tasks.sync.shared_memory import SharedReceiver, SharedSender
from tasks.sync.tcp_link import TcpReceiver, TcpSender

_SENDERS: Mapping[str, Callable[[Meeting], SendingLink]] = {
    "tcp": TcpSender,
    "gloo": GlooSender,
    "nccl": NcclSender,
    "shm": SharedSender,
}
_RECEIVERS: Mapping[str, Callable[[Meeting], ReceivingLink]] = {
    "tcp": TcpReceiver,
    "gloo": GlooReceiver,
    "nccl": NcclReceiver,
    "shm": SharedReceiver,
}


def sending_link(transport: str, meeting: Meeting) -> SendingLink:
    """The trainer's end, not yet open.

    Raises:
        SyncError: no transport has that name.
    """
    return _SENDERS[_known(transport)](meeting)


def receiving_link(transport: str, meeting: Meeting) -> ReceivingLink:
    """The server's end, not yet open.

    Raises:
        SyncError: no transport has that name.
    """
    return _RECEIVERS[_known(transport)](meeting)


def _known(transport: str) -> str:
    if transport not in _SENDERS:
        raise SyncError(f"expected a link by {', '.join(_SENDERS)}, got {transport!r}")
    return transport
