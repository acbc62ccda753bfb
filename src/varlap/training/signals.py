"""Stopping a training between two steps when the user or the cluster asks for it."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self, final

from varlap.errors import ConfigError, Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What clusters send before they end a job, and Ctrl-C."""
TIME_IS_UP = 1_000
"""As a request to stop: no signal has this number."""
REQUESTS = (*map(int, SIGNALS), TIME_IS_UP)


@final
class StopRequests:
    """Remembers the first SIGTERM or SIGINT instead of ending at once; a second one ends at once.

    Python lets only the main thread handle signals, so elsewhere this does nothing. A signal that is ignored stays
    ignored, as in a job that a shell script put into the background. With one `StopRequests` inside another, both
    know of a request.

    >>> import signal
    >>> with StopRequests() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print("the step is finished and saved")
    ...     try:
    ...         stop.raise_if_requested(step=7, saved=True)
    ...     except Interrupted as error:
    ...         print(error)
    the step is finished and saved
    SIGTERM stopped the training; a checkpoint was saved at step 7 and the same command carries on from there
    """

    requested: int | None
    """the number of the first signal, or None"""

    def __init__(self) -> None:
        self.requested = None
        self._previous: dict[int, Any] = {}
        self._entered = False
        self._leaving = False
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if self._entered:
            raise ConfigError("this StopRequests is in use already: write `with StopRequests() as stop:` for another")
        self.requested, self._process = None, os.getpid()
        self._entered, self._leaving = True, False
        try:
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:
                    previous = signal.getsignal(number)
                    # None is a handler from outside Python, which could not be put back.
                    if previous not in (signal.SIG_IGN, None):
                        self._previous[number] = previous
                        signal.signal(number, self._handle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving = True  # an exception out of a handler would leave the other handler in place
        while self._previous:
            signal.signal(*self._previous.popitem())
        self._entered = False

    def raise_if_requested(self, step: int, *, saved: bool) -> None:
        """Raise `Interrupted` if a signal came.

        Args:
            step: how many steps are done.
            saved: whether a checkpoint holds them.

        >>> with StopRequests() as stop:
        ...     stop.raise_if_requested(7, saved=True)
        """
        if self.requested is not None:
            raise Interrupted(self.requested, step, saved)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked data worker: Ctrl-C reaches it too, but the step that needs its data is to be finished;
            # SIGTERM is how its parent ends it.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif self.requested is None:
            self._remember(number)
        elif not self._leaving:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)

    def _remember(self, number: int) -> None:
        if self.requested is None:
            self.requested = number
        outer = getattr(self._previous.get(number), "__self__", None)
        if isinstance(outer, StopRequests):
            outer._remember(number)
