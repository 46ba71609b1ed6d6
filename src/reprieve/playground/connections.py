"""HTTP protocol that closes connections without a request, so that they cannot block other clients."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0  # seconds in which a request's headers must have arrived


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a time limit on a request's headers; `BodyLimit` has the limit on bodies."""

    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Process a piece of a request and update the timer."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run the timer while the headers of a request are outstanding; stop it while a response is in progress."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waits is None:
            self._waits = self.loop.call_later(HEADERS_S, self._expire)

    def _expire(self) -> None:
        self._waits = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None
