"""Signals that ask a job to stop, kept until a step has ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

STOP = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While it is entered, the first stop signal is noted in `received`; a second SIGINT interrupts at once.

    Outside of the main thread Python can handle no signals, and nothing is changed.

    Args:
        signals: which ones ask to stop.
    """

    def __init__(self, signals: Iterable[signal.Signals] = STOP) -> None:
        self.received: signal.Signals | None = None
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
