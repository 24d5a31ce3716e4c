"""Runs tests of a program that is not trusted, which is another process: only plain values go from one to the other.

Standard library only, run as text in a sandbox: `python -I -c TEXT`.

The judge reads a JSON object with `program` and `tests` from standard input and prints one line for each test, `true` or `false`. A test
sees what the program defines as objects that ask the program's process: a call sends plain values (numbers, texts, lists,
dicts, ...) and returns plain ones, so that a program cannot return something that is equal to everything. Its process cannot read
the judge's memory or output, because the judge is not dumpable; it can only end it, and then the tests have not passed.
"""

import ast
import builtins
import ctypes
import inspect
import json
import os
import socket
import struct
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct(">I")
MESSAGE_BYTES = 16 << 20
MODULE = "solution"
"""Module that tests may import the program's names from."""
TESTS = "tests"
"""Module that tests see themselves as."""
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


class JudgedProgram:
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
            changed_values, changed_named = self._peer.decode(changed)
            for given, now in zip(values, changed_values, strict=False):
                _update(given, now)
            for name, given in named.items():
                _update(given, changed_named.get(name))
        except Exception as wrong:
            raise ProgramEndedError from wrong
        if error is not None:
            raise error
        return decoded

    def _call_back(self, request: Any) -> object:
        """Call a function of the test that the program was given; nothing else of the judge can be reached."""
        number, arguments, named = request
        function = self._peer.objects[number]
        if not isinstance(function, types.FunctionType | types.BuiltinFunctionType | type):
            return ["raised", self._peer.encode(_describe(TypeError("not a function")))]
        try:
            value = function(*self._peer.decode(arguments), **self._peer.decode(named))
            return ["returned", self._peer.encode(value)]
        except Exception as error:  # noqa: BLE001 - the program sees it
            return ["raised", self._peer.encode(_describe(error))]


def _describe(error: Exception) -> tuple[str, tuple[object, ...], str]:
    """Return the arguments of `_make_error` that make an exception again."""
    return type(error).__name__, error.args, str(error)


def _make_error(kind: str, arguments: Sequence[object], text: str) -> Exception:
    """Return the exception that the other process raised: Python's own with its arguments, or a ProgramError with its text."""
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        # An exception that the program has made in its own way may not take its arguments again, and what it is derived from does.
        for each in found.__mro__:
            with suppress(Exception):
                made: Exception = each(*arguments)
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
        def call(*arguments: object, **named: object) -> Any:
            status, value = peer.ask([number, peer.encode(list(arguments)), peer.encode(named)])
            if status == "raised":
                raise _make_error(*peer.decode(value))
            return peer.decode(value)

        return call

    def serve(request: Any) -> object:
        what, *encoded = request
        values, named = map(peer.decode, encoded)
        try:
            value = _answer(what, values, named)
            # Lists that the program changes in place go back with the answer.
            changed = (values, named) if what == "call" else ((), {})
            return ["returned", peer.encode(value), peer.encode(changed)]
        except Exception as error:  # noqa: BLE001 - the test sees it
            return ["raised", peer.encode(_describe(error)), peer.encode(((), {}))]

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


def run_tests(program: JudgedProgram, tests: list[str], report: Callable[[bool], object]) -> None:
    """Run tests, and report of each whether it passed: functions and classes of tests that a text defines, otherwise the text."""
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    vars(module).update(program.names)
    for text in tests:
        namespace: dict[str, Any] = {**program.names, "__name__": TESTS}
        has_run, n_found = passes(exec, text, namespace), 0
        for name, each in list(namespace.items()) if has_run else ():
            if name.startswith("test_") and isinstance(each, types.FunctionType):
                found = [passes(run_function, each)]
            elif isinstance(each, type) and each.__module__ == TESTS:
                found = list(run_class(each))
            else:
                continue
            n_found += len(found)
            for has_passed in found:
                report(has_passed)
        if not n_found:
            # A text that defines no test that is known here, and checks nothing itself, has not passed.
            report(has_run and checks_at_once(text))


def passes(test: Callable[..., object], *arguments: object) -> bool:
    """Return True if a test raises nothing."""
    try:
        test(*arguments)
    except (Exception, SystemExit, ProgramEndedError):  # noqa: BLE001 - a test that did not pass
        return False
    return True


def run_function(function: Callable[[], object]) -> None:
    """Run a function that is a test, to its end if it is asynchronous."""
    made = function()
    if inspect.iscoroutine(made):
        # Imported here, because it takes 50 ms.
        import asyncio

        asyncio.run(made)
    elif inspect.isgenerator(made) or inspect.isasyncgen(made):
        raise TypeError("a test that yields has not run")


def run_class(kind: type) -> Iterator[bool]:
    """Run the tests of a class and yield of each whether it passed; nothing if it is no class of tests."""
    unittest: Any = sys.modules.get("unittest")
    if unittest is not None and issubclass(kind, unittest.TestCase):
        yield from _run_cases(unittest, kind)
    elif kind.__name__.startswith("Test"):
        for name in dir(kind):
            if name.startswith("test_"):
                yield passes(_run_method, kind, name)


def _run_cases(unittest: Any, kind: type) -> Iterator[bool]:
    names = unittest.defaultTestLoader.getTestCaseNames(kind)
    passed: list[object] = []

    class Result(unittest.TestResult):  # type: ignore[misc] # the judge imports unittest as an object
        def addSuccess(self, test: object) -> None:  # noqa: N802 - of unittest
            passed.append(test)

        def addExpectedFailure(self, test: object, err: object) -> None:  # noqa: N802 - of unittest
            passed.append(test)

    result = Result()
    # The suite runs what is for a class, such as setUpClass. A test that is skipped has not passed.
    unittest.TestSuite(map(kind, names)).run(result)
    for number in range(len(names)):
        yield number < len(passed)
    if len(passed) == len(names) and not result.wasSuccessful():
        yield False


def _run_method(kind: type, name: str) -> None:
    made = kind()
    getattr(made, "setup_method", bool)()
    try:
        run_function(getattr(made, name))
    finally:
        getattr(made, "teardown_method", bool)()


def runs_nothing(text: str) -> bool:
    """Return True if tests are Python that checks nothing: definitions that nothing calls, and no functions or classes of tests."""
    try:
        defined = list(_walk_at_once(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # It raises when it is run.
        return False
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for each in defined:
        if isinstance(each, functions) and each.name.startswith("test_"):
            return False
        if isinstance(each, ast.ClassDef) and any(
            "Test" in name for name in (each.name[:4], *map(ast.unparse, each.bases))
        ):
            # A class may inherit tests from its bases.
            own = [of.name for of in each.body if isinstance(of, functions)]
            if each.bases or any(name.startswith("test_") for name in own):
                return False
    return not checks_at_once(text)


def checks_at_once(text: str) -> bool:
    """Return True if a text has, outside of definitions, an assert, a raise, or a call that concerns more than imported modules."""
    tree = ast.parse(text)
    other = set(dir(builtins)) - {"exec", "eval"}
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            other |= {(of.asname or of.name).partition(".")[0] for of in each.names if of.name != MODULE}
        elif isinstance(each, ast.ImportFrom) and each.module != MODULE:
            other |= {of.asname or of.name for of in each.names}
    for each in _walk_at_once(tree):
        if isinstance(each, ast.Assert | ast.Raise):
            return True
        if isinstance(each, ast.Call) and any(
            isinstance(of, ast.Name) and of.id not in other for of in ast.walk(each)
        ):
            return True
    return False


def _walk_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a text runs: not what is in functions and classes, nor after `if __name__ == "__main__"`."""
    for each in ast.iter_child_nodes(node):
        yield each
        if isinstance(each, ast.If) and any(
            isinstance(of, ast.Name) and of.id == "__name__" for of in ast.walk(each.test)
        ):
            for of in each.orelse:
                yield of
                yield from _walk_at_once(of)
        elif not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _walk_at_once(each)


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
        program = JudgedProgram(connection, given["program"])
    except (Exception, ProgramEndedError) as error:  # noqa: BLE001 - the program's
        sys.exit(f"the program cannot be run: {type(error).__name__}: {error}"[:1000])
    run_tests(program, given["tests"], lambda has_passed: verdicts.write(f"{json.dumps(has_passed)}\n"))
    verdicts.write("end\n")
    verdicts.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    judge()
