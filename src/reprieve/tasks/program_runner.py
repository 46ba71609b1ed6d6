"""Runs or grades a generated program inside the sandbox. This file does not import Reprieve.

Its source is passed to a fresh interpreter (`python -I -c`), and the job to standard input. It sets its own limits, and
then runs the program, or grades a candidate in two processes that share only two pipes: one runs the candidate and
sends the results of its calls as JSON; the other has the tests and the token that proves a pass, and compares plain
values. The job is read once from a pipe, because the candidate might find a file by another path.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import resource
import sys
import types
from collections import deque

TYPE_CHECKING = False  # importing typing takes 10 ms of each program's 50 ms
if TYPE_CHECKING:
    from typing import Any

_LONGEST = 1 << 25  # characters of a message
_DEEPEST = 100  # nesting depth of values
_MOST_OPEN_FILES = 64
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Numbers of system calls on x86_64 and aarch64; 0 where there is none.
# Refused: memory that no process maps, information about other processes and files, and privileged calls.
_REFUSED = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "inotify_init": (253, 0), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "chown": (92, 0), "fchown": (93, 55),
    "lchown": (94, 0), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "settimeofday": (164, 170), "syslog": (103, 116), "sethostname": (170, 161),
    "setdomainname": (171, 162), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "bpf": (321, 280),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "quotactl": (179, 60), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104), "unshare": (272, 97),
    "setns": (308, 268), "chroot": (161, 51), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "personality": (135, 92),
}  # fmt: skip
# Modes and times: ignored where the isolation does not restrict them to the program's own files.
_OF_OWN_FILES = {
    "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "utime": (132, 0),
    "utimes": (235, 0), "futimesat": (261, 0), "utimensat": (280, 88),
}  # fmt: skip
_PRLIMIT, _SOCKET, _CLONE, _CLONE3 = (302, 261), (41, 198), (56, 220), (435, 435)
_CLONE_NEWUSER, _AF_UNIX, _X32 = 0x10000000, 1, 0x40000000
_ALLOW, _REFUSE, _IGNORE, _MISSING, _KILL = 0x7FFF0000, 0x00050001, 0x00050000, 0x00050026, 0x80000000
_LOAD, _IF_EQUAL, _IF_ABOVE, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets of what a filter sees
_CAPABILITIES_VERSION, _LAST_CAPABILITY = 0x20080522, 63
_PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_FILTER = 24, 22, 38, 2


def give_up(own_files: int, cpu_s: int, file_bytes: int, memory_bytes: int) -> None:
    """Set limits that cannot be raised again, drop capabilities and block system calls.

    Args:
        own_files: 1 where changing modes and times can reach the program's own files only.
        cpu_s: processor seconds of each process.
        file_bytes: of each file.
        memory_bytes: of each process.
    """
    hard = {"CPU": cpu_s, "FSIZE": file_bytes, "CORE": 0, "AS": memory_bytes, "NOFILE": _MOST_OPEN_FILES}
    for name, value in hard.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails for capabilities that do not exist, or if not root
    libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_calls(libc, own_files)


def _filter_calls(libc: Any, own_files: int) -> None:
    """Install a seccomp filter against the calls above, prlimit64 on others, non-local sockets and user namespaces.

    Both mechanisms need it: bubblewrap accepts compiled filters only, and sandlock denies calls by name alone.

    Raises:
        OSError: the kernel rejects the filter, or the processor's architecture is not supported.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"system calls of {machine} are not known, only those of {', '.join(_ARCHITECTURES)}")
    column = list(_ARCHITECTURES).index(machine)
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, _NUMBER), (_IF_ABOVE, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    answers = dict.fromkeys(_REFUSED.values(), _REFUSE) | {_CLONE3: _MISSING}  # then libraries use clone
    answers |= {} if own_files else dict.fromkeys(_OF_OWN_FILES.values(), _IGNORE)
    for numbers, answer in answers.items():
        if numbers[column]:
            steps += [(_IF_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, answer)]
    for numbers, test in (
        (_PRLIMIT, (_IF_EQUAL, 1, 0, 0)),
        (_SOCKET, (_IF_EQUAL, 1, 0, _AF_UNIX)),
        (_CLONE, (_IF_BITS, 0, 1, _CLONE_NEWUSER)),
    ):
        steps += [(_IF_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), test]
        steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
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


def run() -> None:
    """Read the job, and run its program on its input."""
    import runpy

    job = json.loads(sys.stdin.buffer.read())
    for name, text in (("program.py", job["program"]), ("stdin", job["stdin"])):
        with open(name, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)
    opened = os.open("stdin", os.O_RDONLY)
    os.dup2(opened, 0)
    os.close(opened)
    with open(0, encoding="utf-8", errors="surrogateescape") as sys.stdin:
        runpy.run_path("program.py", run_name="__main__")


def as_json(value: Any, kept: list[Any] | None = None, depth: int = 0) -> Any:
    """Return a value as JSON with its type; other objects are added to `kept` and sent as their index.

    Raises:
        TypeError: the value is nested too deeply, or is not a plain value and `kept` is None.
    """
    kind = type(value)
    if depth > _DEEPEST:
        raise TypeError("values too deep")
    if kind in (bool, type(None)):
        return value
    if kind is Elsewhere:
        return ["kept", value._number]
    # A subclass may claim to equal everything; its plain value does not.
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
    """Inverse of `as_json`; `kept(number)` returns the object with that index."""
    if not isinstance(value, list):
        return value
    name, *rest = value
    if name in _COLLECTIONS:
        return _COLLECTIONS[name]([from_json(item, kept) for item in rest[0]])
    if name == "dict":
        return {from_json(key, kept): from_json(item, kept) for key, item in rest[0]}
    return _PLAIN[name](*rest) if name in _PLAIN else kept(int(rest[0]))


_PLAIN: dict[str, Any] = {
    "bytes": bytes.fromhex, "bytearray": bytearray.fromhex, "int": lambda text: int(text, 16), "float": float,
    "complex": lambda real, imaginary: complex(float(real), float(imaginary)), "range": range,
}  # fmt: skip
_COLLECTIONS: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "iterator": iter
}  # fmt: skip


class Channel:
    """Messages over two pipes, a line each."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")

    def send(self, message: Any) -> None:
        self.writes.write(json.dumps(message).encode() + b"\n")
        self.writes.flush()

    def receive(self) -> Any:
        line = self.reads.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def answer_calls(channel: Channel) -> None:
    """The candidate's process: run its code, then look up names and call functions as asked."""
    module = types.ModuleType("program")  # code under `if __name__ == "__main__"` must not run
    sys.modules["program"] = module
    names = vars(module)
    exec(compile(channel.receive(), "program", "exec"), names)
    kept: list[Any] = []
    while True:
        call = channel.receive()
        try:
            if "look" in call:
                reply = {"value": as_json(eval(call["look"], names), kept)}
            else:
                positional = [from_json(value, kept.__getitem__) for value in call["args"]]
                named = {key: from_json(value, kept.__getitem__) for key, value in call["kwargs"].items()}
                result = kept[call["call"]](*positional, **named)
                left = {key: as_json(value, kept) for key, value in named.items()}
                reply = {"value": as_json(result, kept), "args": [as_json(value, kept) for value in positional]}
                reply["kwargs"] = left
        except BaseException as error:
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "args": [str(error)[:1000]]}
            with contextlib.suppress(Exception):
                reply["args"] = as_json(list(error.args))
        channel.send(reply)


class Elsewhere:
    """Reference to an object in the candidate's process: callable, can be passed back, equals only itself."""

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
        result = self._received(reply)
        for argument, changed in zip(args, reply["args"], strict=True):
            _change(argument, self._decoded(changed))
        for key, changed in reply["kwargs"].items():
            _change(kwargs[key], self._decoded(changed))
        return result

    def _received(self, reply: dict[str, Any]) -> Any:
        if "raised" in reply:
            raise self._error(reply["raised"], reply["args"])
        return self._decoded(reply["value"])

    def _error(self, kinds: list[str], args: Any) -> Exception:
        """Return the builtin exception closest to the one raised."""
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
        """Return the value of an expression in the candidate's process."""
        channel.send({"look": expression})
        return cls(channel, -1)._received(channel.receive())


class Names(dict):  # type: ignore[type-arg]
    """Namespace of the tests; unknown names, and `__candidate__(expression)`, are looked up in the candidate."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._channel = channel
        self["__candidate__"] = lambda expression: Elsewhere.named(channel, expression)

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        return Elsewhere.named(self._channel, name)


def _change(old: Any, new: Any) -> Any:
    """Apply a call's changes to an argument in place, if its type allows; return the object to use from now on."""
    if isinstance(old, list | deque) and type(old) is type(new):
        if len(old) == len(new):  # otherwise inner objects cannot be matched
            new = [_change(*both) for both in zip(old, new, strict=True)]
        old.clear()
        old.extend(new)
        return old
    if isinstance(old, dict) and type(old) is type(new):
        changed = {key: _change(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(changed)
        return old
    if isinstance(old, set) and type(old) is type(new):
        old.clear()
        old.update(new)
        return old
    return new


def grade() -> None:
    """Fork before reading the job; one process then checks the results of the other."""
    to_candidate, from_candidate = os.pipe(), os.pipe()
    candidate = os.fork()
    if candidate == 0:
        os.close(to_candidate[1])
        os.close(from_candidate[0])
        channel = Channel(to_candidate[0], from_candidate[1])
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # they carry the job and the verdict of the other process
            os.dup2(nothing, number)
        os.close(nothing)
        try:
            answer_calls(channel)
        finally:
            os._exit(1)
    os.close(to_candidate[0])
    os.close(from_candidate[1])
    channel = Channel(from_candidate[0], to_candidate[1])
    job = json.loads(sys.stdin.buffer.read())
    names = Names(channel)
    channel.send(job["candidate"])
    exec(compile(job["setup"], "setup", "exec"), names)
    exec(compile(job["checks"], "checks", "exec"), names)
    sys.stdout.write(f"\n{job['token']}\n")
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.kill(candidate, 9)


def main() -> None:
    grades, *limits = (int(number) for number in sys.argv[1:])
    give_up(*limits)
    grade() if grades else run()


if __name__ == "__main__":
    main()
