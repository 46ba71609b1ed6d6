"""Checks large request bodies in a separate process: parsing holds the GIL, which decoding needs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from reprieve.errors import ReprieveError
from reprieve.playground.bodies import Body, ChatBody, CompletionBody, Context, MalformedBodyError, read_body

_INLINE = 1 << 14  # bytes; bodies up to this size are parsed in this process, in less than a millisecond
_KINDS = (CompletionBody, ChatBody)
_HEAD = struct.Struct("!BQ")  # number of the kind, bytes of the body
_START = "import sys; sys.path[:] = {path!r}; from reprieve.playground.checker import answer; answer({context!r})"


class BodyChecker:
    """Reads request bodies; a separate process checks large ones first, one at a time.

    Args:
        context: of the models; longer prompts are refused.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._thread = ThreadPoolExecutor(1, "reprieve-bodies")
        self._process: subprocess.Popen[bytes] | None = None

    async def read(self, kind: type[Body], pieces: Sequence[bytes]) -> Body:
        """Parse and check a body.

        Raises:
            MalformedBodyError: see `read_body`, or a prompt is too long for the context.
            ReprieveError: the process ended twice.
        """
        if sum(map(len, pieces)) > _INLINE:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._check, kind, pieces)
        return read_body(kind, b"".join(pieces), self.context)

    def start(self) -> None:
        """Start the process, so that the first large body need not wait for it."""
        self._thread.submit(self._started)

    def close(self) -> None:
        """End the process."""
        self._thread.submit(self._end).result()
        self._thread.shutdown()

    def _check(self, kind: type[Body], pieces: Sequence[bytes]) -> None:
        for _ in range(2):
            try:
                found = self._ask(kind, pieces)
            except (OSError, ValueError):  # the process has ended
                self._end()
            else:
                if found:
                    raise MalformedBodyError(*found)
                return
        raise ReprieveError("the process that checks request bodies ended twice")

    def _ask(self, kind: type[Body], pieces: Sequence[bytes]) -> list[str]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        for piece in (_HEAD.pack(_KINDS.index(kind), sum(map(len, pieces))), *pieces):
            process.stdin.write(piece)
        process.stdin.flush()
        found: list[str] = json.loads(process.stdout.readline())
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            start = _START.format(path=[path for path in sys.path if path], context=tuple(vars(self.context).values()))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", start],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to the server only; this process ends with it
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):
                self._process.communicate()
            self._process = None


def answer(context: tuple[int, int]) -> None:
    """Check bodies from standard input until it is closed; write a line for each: [], or the error and its field."""
    gc.freeze()
    gc.disable()  # while hundreds of thousands of values are made; what is parsed has no cycles
    while head := sys.stdin.buffer.read(_HEAD.size):
        kind, size = _HEAD.unpack(head)
        found: list[str | None] = []
        try:
            read_body(_KINDS[kind], sys.stdin.buffer.read(size), Context(*context))
        except MalformedBodyError as error:
            found = [str(error), error.parameter]
        sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
        sys.stdout.buffer.flush()
        gc.collect()
