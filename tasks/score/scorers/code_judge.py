"""Runs tests of a program that is not trusted, which is another process: only plain values go from one to the other.

Standard library only, run as text in a sandbox: `python -I -c TEXT`.

The judge reads a JSON object with `program` and `tests` from standard input and prints one line for each test, `true` or `false`. A test
sees what the program defines as objects that ask the program's process: a call sends plain values (numbers, texts, lists,
dicts, ...) and returns plain ones, so that a program cannot return something that is equal to everything. Its process cannot read
the judge's memory or output, because the judge is not dumpable; it can only end it, and then the tests have not passed.
"""

import builtins
import ctypes
import json
import os
import socket
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")
MESSAGE_BYTES = 16 << 20
MODULE = "solution"
"""Module that tests may import the program's names from."""
_PR_SET_DUMPABLE = 4
_PLAIN = (type(None), bool, str)
# Of what a program defines: names that a test would otherwise mean are its own.
_OWN = frozenset(dir(builtins))


class ProgramEndedError(BaseException):
    """The program's process has ended, or broke the protocol; no Exception, so that no test takes it for one of the program."""


class ProgramError(Exception):
    """The program raised an exception that is not one of Python's own."""


class Peer:
    """One end of the socket between judge and program, and the objects of this end that the other one knows by number.

    Attributes:
        objects: those objects.
        wrap: makes an object of the other end from its number.
        serve: handles a request of the other end, and returns its answer.
    """

    def __init__(
        self, connection: socket.socket, wrap: Callable[[int], object], serve: Callable[[Any], object]
    ) -> None:
        self._connection, self.wrap, self.serve = connection, wrap, serve
        self.objects: list[object] = []

    def send(self, message: object) -> None:
        """Send a JSON value."""
        body = json.dumps(message).encode()
        if len(body) > MESSAGE_BYTES:
            raise ValueError("the values are too large")
        try:
            self._connection.sendall(LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ProgramEndedError from error

    def receive(self) -> Any:
        """Receive a JSON value.

        Raises:
            ProgramEndedError: the other end is closed, or sent something else.
        """
        try:
            (n_bytes,) = LENGTH.unpack(self._read(LENGTH.size))
            if n_bytes > MESSAGE_BYTES:
                raise ProgramEndedError
            return json.loads(self._read(n_bytes))
        except (OSError, ValueError) as error:
            raise ProgramEndedError from error

    def ask(self, request: object) -> Any:
        """Send a request and return the answer; requests of the other end are served meanwhile."""
        self.send(["ask", request])
        while True:
            kind, body = self.receive()
            if kind == "answer":
                return body
            self.send(["answer", self.serve(body)])

    def _read(self, n_bytes: int) -> bytes:
        found = bytearray()
        while len(found) < n_bytes:
            new = self._connection.recv(min(1 << 16, n_bytes - len(found)))
            if not new:
                raise ProgramEndedError
            found += new
        return bytes(found)

    def encode(self, value: object) -> Any:
        """Return a value as JSON; what is not plain as its number among `objects`. Example: (1, 2.5) is ["tuple", [1, ["float", "2.5"]]]."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return ["float", repr(float(value))]
        if isinstance(value, complex):
            return ["complex", [repr(value.real), repr(value.imag)]]
        if isinstance(value, bytes | bytearray):
            return [type(value).__name__, bytes(value).decode("latin1")]
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return [kind.__name__, [self.encode(each) for each in value]]
        if isinstance(value, dict):
            return ["dict", [[self.encode(key), self.encode(each)] for key, each in value.items()]]
        if isinstance(value, Remote):
            return ["yours", object.__getattribute__(value, "_number")]
        self.objects.append(value)
        return ["mine", len(self.objects) - 1]

    def decode(self, value: Any) -> Any:
        """Return the value of a JSON value that the other end's `encode` made."""
        if not isinstance(value, list):
            return value
        kind, body = value
        if kind == "float":
            return float(body)
        if kind == "complex":
            return complex(*map(float, body))
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(body, "latin1")
        if kind == "dict":
            return {self.decode(key): self.decode(each) for key, each in body}
        if kind == "mine":
            return self.wrap(body)
        if kind == "yours":
            return self.objects[body]
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](
            map(self.decode, body)
        )


class Remote:
    """An object of the program, as a test sees it: every use asks the program's process.

    It is equal to itself alone: the program's comparison is not asked.
    """

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, "_ask")("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        object.__getattribute__(self, "_ask")("set", self, name, value)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return object.__getattribute__(self, "_ask")("call", self, *arguments, **named)

    def __getitem__(self, key: object) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __bool__(self) -> bool:
        return object.__getattribute__(self, "_ask")("truth", self) is True

    def __len__(self) -> int:
        try:
            return int(self.__getattr__("__len__")())
        except AttributeError as error:
            # As Python has it for an object without a length, such as a generator.
            raise TypeError("object has no len()") from error

    def __str__(self) -> str:
        return str(self.__getattr__("__str__")())

    def __iter__(self) -> Any:
        made = self.__getattr__("__iter__")()
        while True:
            try:
                yield made.__next__()
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self.__getattr__("__next__")()

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *_: object) -> Any:
        return self.__getattr__("__exit__")(None, None, None)


class Program:
    """The program's process, as the judge sees it."""

    def __init__(self, connection: socket.socket, source: str) -> None:
        self._peer = Peer(connection, lambda number: Remote(self.ask, number), self._call_back)
        # The program's process is not trusted here either: it must not replace `sorted`, or `__builtins__`.
        names, values = self.ask("load", source)
        self.names: dict[str, Any] = {
            name: value for name, value in zip(names, values, strict=True) if _is_offered(name)
        }

    def ask(self, what: str, *values: Any, **named: Any) -> Any:
        """Ask the program's process; raises what the program raised."""
        answer = self._peer.ask([what, self._peer.encode(values), self._peer.encode(named)])
        try:
            status, value, changed = answer
            decoded = self._peer.decode(value)
            error = _make_error(*decoded) if status == "raised" else None
            for given, now in zip(values, self._peer.decode(changed), strict=False):
                _update(given, now)
        except Exception as wrong:
            raise ProgramEndedError from wrong
        if error is not None:
            raise error
        return decoded

    def _call_back(self, request: Any) -> object:
        """Call a function of the test that the program was given; nothing else of the judge can be reached."""
        number, arguments = request
        function = self._peer.objects[number]
        if not isinstance(function, types.FunctionType | types.BuiltinFunctionType | type):
            return ["raised", ["TypeError", "not a function"]]
        try:
            return ["returned", self._peer.encode(function(*self._peer.decode(arguments)))]
        except Exception as error:  # noqa: BLE001 - the program sees it
            return ["raised", [type(error).__name__, str(error)]]


def _make_error(kind: str, text: str) -> Exception:
    """Return the exception that the program raised: Python's own, or a ProgramError."""
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        made: Exception = found(text)
        return made
    return ProgramError(f"{kind}: {text}")


def _is_offered(name: object) -> bool:
    return isinstance(name, str) and not name.startswith("__") and name not in _OWN


def _update(given: object, now: object) -> None:
    """Change a list, dict, set or bytearray that a test has passed as the program has changed it."""
    if isinstance(given, list | bytearray) and type(given) is type(now):
        given[:] = now
    elif isinstance(given, dict | set) and type(given) is type(now):
        given.clear()
        given.update(now)


def serve_program(connection: socket.socket) -> None:
    """Be the program's process: run the program, and answer what tests ask of it."""

    def wrap(number: int) -> object:
        def call(*arguments: object) -> Any:
            status, value = peer.ask([number, peer.encode(list(arguments))])
            if status == "raised":
                raise _make_error(*value)
            return peer.decode(value)

        return call

    def serve(request: Any) -> object:
        what, *encoded = request
        values, named = map(peer.decode, encoded)
        try:
            value = _answer(what, values, named)
            # Lists that the program changes in place go back with the answer.
            return ["returned", peer.encode(value), peer.encode(values if what == "call" else ())]
        except Exception as error:  # noqa: BLE001 - the test sees it
            return ["raised", peer.encode((type(error).__name__, str(error))), peer.encode(())]

    peer = Peer(connection, wrap, serve)
    while True:
        peer.send(["answer", serve(peer.receive()[1])])


def _answer(what: str, values: Any, named: Any) -> object:
    if what == "load":
        module = types.ModuleType(MODULE)
        sys.modules[MODULE] = module
        exec(compile(values[0], f"{MODULE}.py", "exec"), module.__dict__)
        found = {name: each for name, each in vars(module).items() if not isinstance(each, types.ModuleType)}
        offered = [name for name in found if _is_offered(name)]
        return offered, [found[name] for name in offered]
    if what == "get":
        return getattr(*values)
    if what == "set":
        setattr(*values)
        return None
    return bool(values[0]) if what == "truth" else values[0](*values[1:], **named)


def run_tests(program: Program, tests: list[str], report: Callable[[bool], object]) -> None:
    """Run tests, and report of each whether it passed. Functions `test_...` that a text defines are a test each, otherwise the text is."""
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    vars(module).update(program.names)
    for text in tests:
        namespace: dict[str, Any] = {**program.names, "__name__": "tests"}
        has_run = passes(exec, text, namespace)
        functions = [
            each
            for name, each in namespace.items()
            if name.startswith("test_") and isinstance(each, types.FunctionType)
        ]
        if not has_run or not functions:
            report(has_run)
            continue
        for function in functions:
            report(passes(function))


def passes(test: Callable[..., object], *arguments: object) -> bool:
    """Return True if a test raises nothing."""
    try:
        test(*arguments)
    except (Exception, SystemExit, ProgramEndedError):  # noqa: BLE001 - a test that did not pass
        return False
    return True


def start_program() -> socket.socket:
    """Start the program's process, and return the socket to it. It has a copy of this one's memory, which has read nothing yet."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    try:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        serve_program(theirs)
    finally:
        os._exit(0)


def judge() -> None:
    """Be the judge."""
    # From here on no other process of the sandbox can read this one.
    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        sys.exit("prctl failed")
    connection = start_program()
    given = json.load(sys.stdin)
    # What tests print is no verdict.
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        program = Program(connection, given["program"])
    except (Exception, ProgramEndedError) as error:  # noqa: BLE001 - the program's
        sys.exit(f"the program cannot be run: {type(error).__name__}: {error}"[:1000])
    run_tests(program, given["tests"], lambda has_passed: verdicts.write(f"{json.dumps(has_passed)}\n"))
    verdicts.write("end\n")
    verdicts.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    judge()
