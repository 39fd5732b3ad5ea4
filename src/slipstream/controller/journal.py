"""The journal of one incarnation: events go through here into state and ledger, and what the observer hears waits until it is durable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slipstream.controller import events as ev
from slipstream.controller.ledger import Ledger
from slipstream.controller.state import RunState, apply
from slipstream.errors import RunFailed
from slipstream.protocols import Observer
from slipstream.types import EvalResult, Group, SealedChunk


class Journal:
    """State, ledger and observer in step with each other. `error` is what ends the run, once something does."""

    def __init__(self, ledger: Ledger, state: RunState, observer: Observer):
        self.ledger, self.state, self.observer = ledger, state, observer
        self.error: BaseException | None = None
        self._torn = False  # the ledger missed an event
        self._outbox: list[Callable[[], None]] = []

    def record(self, event: ev.Event, data: Group | Sequence[SealedChunk] | EvalResult | None = None) -> None:
        """Apply the event and append it with the data that belongs to it; LedgerError, without effect, for an illegal one."""
        self.state = apply(self.state, event)
        with self._tearing():
            self.ledger.append(event, self.state.incarnation)
            if data is not None:
                self.ledger.put(data, self.state.incarnation)

    def tell(self, message: Callable[[], None]) -> None:
        """Give the observer this message once everything so far is durable."""
        self._outbox.append(message)

    def commit(self) -> None:
        """Make all events durable, then tell the observer what happened."""
        if self._torn:
            self.check()
        with self._tearing():
            self.ledger.commit()
        told, self._outbox = self._outbox, []
        for message in told:
            message()

    def fail(self, error: BaseException) -> None:
        """The run ends with this error; the first one counts.

        KeyboardInterrupt or a cancellation is its receiver's alone: raised in the tasks of all who ask, it would stop the event loop in
        the middle of the clean-up.
        """
        if not isinstance(error, Exception):
            error = RunFailed(f"stopped at once ({type(error).__name__})")
        self.error = self.error or error

    def check(self) -> None:
        """Raise the error that ends the run, if there is one."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Close the ledger; what could not be written whole is left out whole."""
        if self._torn:
            self.ledger.abandon()
        else:
            self.commit()
        self.ledger.close()

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """A ledger that cannot take an event is behind the state from then on: nothing more may be written, the run ends."""
        try:
            yield
        except BaseException as error:
            self._torn = True
            self.fail(error)
            raise
