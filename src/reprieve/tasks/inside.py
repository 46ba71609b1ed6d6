"""What runs inside the sandbox, before and around a program: nothing of Reprieve is imported here.

Its text is given to a fresh interpreter (`python -I -c`), the job as an argument. It gives up what it may, and then
either runs `program.py`, or grades a candidate in two processes that share nothing but two pipes: one has the candidate
and says what its calls give, as JSON; the other has the tests and the number that a pass must show, and compares plain
values. Those come over a pipe that is read once: a file of theirs could be found by another path.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import resource
import sys
import types
from collections import deque

TYPE_CHECKING = False  # typing itself takes 10 ms to import, of each program's 50
if TYPE_CHECKING:
    from typing import Any

_LONGEST = 1 << 25  # characters of a message
_DEEPEST = 100  # values in values
# Of the kernel: an architecture, the numbers of prlimit64 and socket there, and those of calls that are refused: the
# sandbox's own copy-on-write handles these by path, and lets them through outside its folder.
_ARCHITECTURES = {
    # chmod, fchmod, chown, fchown, lchown, utime, utimes, fchownat, futimesat, fchmodat, utimensat, fchmodat2
    "x86_64": (0xC000003E, 302, 41, (90, 91, 92, 93, 94, 132, 235, 260, 261, 268, 280, 452)),
    # fchmod, fchmodat, fchownat, fchown, utimensat, fchmodat2
    "aarch64": (0xC00000B7, 261, 198, (52, 53, 54, 55, 88, 452)),
}
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: with EPERM
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NETLINK = 16
_CAPABILITIES_VERSION, _LAST_CAPABILITY = 0x20080522, 63
_PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_FILTER = 24, 22, 38, 2


def give_up(cpu_s: int, file_bytes: int, memory_bytes: int) -> None:
    """Limits that cannot be raised again, no capabilities, and no hands on the limits of others."""
    for name, value in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(name, (value, value))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails for what there is not, or without being root
    libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.uname().machine in _ARCHITECTURES:
        _filter_calls(libc, *_ARCHITECTURES[os.uname().machine])


def _filter_calls(libc: Any, architecture: int, prlimit: int, socket: int, refused: tuple[int, ...]) -> None:
    """A seccomp program: `refused` fail, and so do prlimit64 for any process but its own, and netlink sockets.

    Raises:
        OSError: the kernel does not take it.
    """
    steps = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    steps += [step for number in refused for step in ((_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE))]
    steps += [(_IF_EQUAL, 0, 4, prlimit), (_LOAD, 0, 0, 16), (_IF_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
    steps += [(_RETURN, 0, 0, _ALLOW)]
    steps += [(_IF_EQUAL, 0, 3, socket), (_LOAD, 0, 0, 16), (_IF_EQUAL, 0, 1, _NETLINK), (_RETURN, 0, 0, _REFUSE)]
    steps += [(_RETURN, 0, 0, _ALLOW)]
    code = b"".join(
        operation.to_bytes(2, "little") + bytes((true, false)) + value.to_bytes(4, "little")
        for operation, true, false, value in steps
    )
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    program = Program(len(steps), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def redirect(*, keep_input: bool) -> None:
    """Input and output from and to files."""
    for number, name in list(enumerate(("stdin", "stdout", "stderr")))[keep_input:]:
        opened = os.open(name, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)


def as_json(value: Any, kept: list[Any] | None = None, depth: int = 0) -> Any:
    """A value as JSON that says its type; what is no plain value is kept, and named by its number.

    Raises:
        TypeError: a value that cannot be sent where nothing is kept.
    """
    kind = type(value)
    if depth > _DEEPEST:
        raise TypeError("values too deep")
    if kind in (bool, type(None)):
        return value
    if kind is Elsewhere:
        return ["kept", value._number]
    # A subclass may say that it equals everything: its value does not.
    if isinstance(value, str):
        return str.__add__(value, "")
    if isinstance(value, int):
        return ["int", hex(int.__pos__(value))]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, bytes(value).hex()]
    if kind is complex:
        return ["complex", repr(value.real), repr(value.imag)]
    if kind is range:
        return ["range", value.start, value.stop, value.step]
    for name, base in list(_COLLECTIONS.items())[:-1]:
        if isinstance(value, base):
            items: Any = base.__iter__(value)
            return [name, [as_json(item, kept, depth + 1) for item in items]]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["dict", [[as_json(key, kept, depth + 1), as_json(item, kept, depth + 1)] for key, item in pairs]]
    if isinstance(value, _VIEWS) or hasattr(kind, "__next__"):
        return ["iterator", [as_json(item, kept, depth + 1) for item in value]]
    if kept is None:
        raise TypeError(f"a {kind.__name__} cannot be sent")
    kept.append(value)
    return ["kept", len(kept) - 1]


_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))


def from_json(value: Any, kept: Any) -> Any:
    """The inverse; `kept(number)` gives what was kept."""
    if not isinstance(value, list):
        return value
    name, *rest = value
    if name in _COLLECTIONS:
        items = [from_json(item, kept) for item in rest[0]]
        return _COLLECTIONS[name](items)
    if name == "dict":
        return {from_json(key, kept): from_json(item, kept) for key, item in rest[0]}
    if name in ("bytes", "bytearray"):
        return bytes.fromhex(rest[0]) if name == "bytes" else bytearray.fromhex(rest[0])
    if name == "int":
        return int(rest[0], 16)
    if name == "float":
        return float(rest[0])
    if name == "complex":
        return complex(float(rest[0]), float(rest[1]))
    if name == "range":
        return range(*(int(item) for item in rest))
    return kept(int(rest[0]))


_COLLECTIONS: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "iterator": iter
}  # fmt: skip


class Channel:
    """Messages over two pipes, a line each."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")

    def send(self, message: Any) -> None:
        import json

        self.writes.write(json.dumps(message).encode() + b"\n")
        self.writes.flush()

    def receive(self) -> Any:
        import json

        line = self.reads.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def answer_calls(channel: Channel) -> None:
    """The candidate's process: run its code, then look up names and call functions as asked."""
    module = types.ModuleType("program")  # what stands under `if __name__ == "__main__"` is not for tests
    sys.modules["program"] = module
    names = vars(module)
    exec(compile(channel.receive(), "program", "exec"), names)
    kept: list[Any] = []
    while True:
        asked = channel.receive()
        try:
            if "look" in asked:
                reply = {"value": as_json(eval(asked["look"], names), kept)}
            else:
                positional = [from_json(value, kept.__getitem__) for value in asked["args"]]
                named = {key: from_json(value, kept.__getitem__) for key, value in asked["kwargs"].items()}
                made = kept[asked["call"]](*positional, **named)
                left = {key: as_json(value, kept) for key, value in named.items()}
                reply = {"value": as_json(made, kept), "args": [as_json(value, kept) for value in positional]}
                reply["kwargs"] = left
        except BaseException as error:
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "args": [str(error)[:1000]]}
            with contextlib.suppress(Exception):
                reply["args"] = as_json(list(error.args))
        channel.send(reply)


class Elsewhere:
    """What the candidate's process keeps: it can be called and handed back, and equals only itself."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._number = channel, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._channel.send(
            {
                "call": self._number,
                "args": [as_json(value) for value in args],
                "kwargs": {key: as_json(value) for key, value in kwargs.items()},
            }
        )
        reply = self._channel.receive()
        made = self._received(reply)
        for ours, theirs in zip(args, reply["args"], strict=True):
            _change(ours, self._decoded(theirs))
        for key, theirs in reply["kwargs"].items():
            _change(kwargs[key], self._decoded(theirs))
        return made

    def _received(self, reply: dict[str, Any]) -> Any:
        if "raised" in reply:
            raise self._error(reply["raised"], reply["args"])
        return self._decoded(reply["value"])

    def _error(self, kinds: list[str], args: Any) -> Exception:
        """As near to what was raised as a builtin exception comes."""
        given = self._decoded(args) if args and args[0] == "list" else args
        for name in kinds:
            kind: Any = getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                with contextlib.suppress(Exception):
                    return kind(*given)
        return RuntimeError(*given)

    def _decoded(self, value: Any) -> Any:
        return from_json(value, lambda number: Elsewhere(self._channel, number))

    @classmethod
    def named(cls, channel: Channel, expression: str) -> Any:
        """What an expression is over there."""
        channel.send({"look": expression})
        return cls(channel, -1)._received(channel.receive())


class Names(dict):  # type: ignore[type-arg]
    """Names of the tests; those they do not know are the candidate's, and `__candidate__(expression)` always is."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._channel = channel
        self["__candidate__"] = lambda expression: Elsewhere.named(channel, expression)

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        return Elsewhere.named(self._channel, name)


def _change(ours: Any, theirs: Any) -> Any:
    """What a call did to an argument, seen by all who hold it; returns what stands in its place."""
    if isinstance(ours, list | deque) and type(ours) is type(theirs):
        if len(ours) == len(theirs):  # else one cannot tell which of the inner ones is which
            theirs = [_change(*both) for both in zip(ours, theirs, strict=True)]
        ours.clear()
        ours.extend(theirs)
        return ours
    if isinstance(ours, dict) and type(ours) is type(theirs):
        changed = {key: _change(ours[key], value) if key in ours else value for key, value in theirs.items()}
        ours.clear()
        ours.update(changed)
        return ours
    if isinstance(ours, set) and type(ours) is type(theirs):
        ours.clear()
        ours.update(theirs)
        return ours
    return theirs


def grade() -> None:
    """Fork before anything is known; then one process checks what the other gives."""
    to_candidate, from_candidate = os.pipe(), os.pipe()
    candidate = os.fork()
    if candidate == 0:
        os.close(to_candidate[1])
        os.close(from_candidate[0])
        channel = Channel(to_candidate[0], from_candidate[1])
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # the job comes that way, once, to the other process
        os.close(nothing)
        try:
            answer_calls(channel)
        finally:
            os._exit(1)
    os.close(to_candidate[0])
    os.close(from_candidate[1])
    channel = Channel(from_candidate[0], to_candidate[1])
    import json

    job = json.loads(sys.stdin.buffer.read())
    names = Names(channel)
    channel.send(job["candidate"])
    exec(compile(job["setup"], "setup", "exec"), names)
    exec(compile(job["checks"], "checks", "exec"), names)
    with open("stdout", "a") as out:
        out.write(f"\n{job['token']}\n")
    with contextlib.suppress(OSError):
        os.kill(candidate, 9)


def main() -> None:
    grades, *limits = (int(number) for number in sys.argv[1:])
    redirect(keep_input=bool(grades))
    give_up(*limits)
    if grades:
        grade()
        return
    import runpy

    runpy.run_path("program.py", run_name="__main__")


if __name__ == "__main__":
    main()
