"""The filter of system calls in a sandbox, a program of classic BPF as seccomp(2) takes it.

It refuses what namespaces and limits do not cover: memory that belongs to no process and no file system (System V segments, memfd,
shared anonymous memory, pages given to pipes, larger buffers of sockets), families of sockets outside of the network namespace
(AF_VSOCK reaches the host of a virtual machine), further namespaces, tracing, and interfaces in which the kernel had most of its faults (io_uring, bpf, userfaultfd, keys).
"""

import errno
import struct
from collections.abc import Mapping

from rollmill.tasks.errors import SandboxError

# Numbers by machine, from the kernel's tables, in the order of the names.
_NAMES = (
    *(
        "shmget",
        "msgget",
        "mq_open",
        "memfd_create",
        "memfd_secret",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
    ),
    *("pidfd_getfd", "unshare", "setns", "clone3", "io_uring_setup", "bpf", "userfaultfd", "perf_event_open"),
    *("add_key", "request_key", "keyctl", "semget", "vmsplice"),
)
_REFUSED: Mapping[str, tuple[int, ...]] = {
    "x86_64": (
        *(29, 68, 240, 319, 447, 101, 310, 311, 438, 272, 308, 435, 425, 321, 323, 298, 248, 249, 250),
        *(64, 278),
    ),
    "aarch64": (
        *(194, 186, 180, 279, 447, 117, 270, 271, 438, 97, 268, 435, 425, 280, 282, 241, 217, 218, 219),
        *(190, 75),
    ),
}
# AUDIT_ARCH_*, and the numbers of clone, mmap, setsockopt and socket.
_MACHINES: Mapping[str, tuple[int, int, int, int, int]] = {
    "x86_64": (0xC000003E, 56, 9, 54, 41),
    "aarch64": (0xC00000B7, 220, 222, 208, 198),
}
# From this number on x86_64 has calls of another interface, x32.
_X32 = 0x40000000
# Flags of clone that make namespaces.
_NEW_NAMESPACES = 0x7E020000
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK.
_FAMILIES = (1, 2, 10, 16)
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_SOL_SOCKET = 1
# SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_ZEROCOPY.
_BUFFERS = (7, 8, 32, 33, 60)

_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
# The lower halves of arguments.
_FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT, _FOURTH_ARGUMENT = 16, 24, 32, 40
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOSYS


def make_filter(machine: str) -> bytes:
    """Return the filter for a machine, such as x86_64: instructions of struct sock_filter.

    Raises:
        SandboxError: the numbers of its system calls are not known here.
    """
    if machine not in _MACHINES:
        raise SandboxError(f"the filter of system calls is for {' and '.join(_MACHINES)}, not {machine!r}")
    architecture, clone, mmap, setsockopt, socket = _MACHINES[machine]
    refuse, allow = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)
    # A jump is relative: 0 is the next instruction, 1 the one after it.
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), refuse]
    program += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), refuse]
    for number in _REFUSED[machine]:
        program += [(_EQUAL, 0, 1, number), refuse]
    program += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), refuse, allow]
    program += [(_EQUAL, 0, 5, mmap), (_LOAD, 0, 0, _FOURTH_ARGUMENT)]
    program += [(_ANY_BIT, 0, 2, _MAP_ANONYMOUS), (_ANY_BIT, 0, 1, _MAP_SHARED), refuse, allow]
    program += [(_EQUAL, 0, 4 + 2 * len(_BUFFERS), setsockopt), (_LOAD, 0, 0, _SECOND_ARGUMENT)]
    program += [(_EQUAL, 0, 1 + 2 * len(_BUFFERS), _SOL_SOCKET), (_LOAD, 0, 0, _THIRD_ARGUMENT)]
    for option in _BUFFERS:
        program += [(_EQUAL, 0, 1, option), refuse]
    program += [allow]
    program += [(_EQUAL, 0, 2 + 2 * len(_FAMILIES), socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for family in _FAMILIES:
        program += [(_EQUAL, 0, 1, family), allow]
    program += [refuse, allow]
    return b"".join(_INSTRUCTION.pack(*each) for each in program)
