"""Why a run stops early: a signal, the time or the iteration that a flag names; as text for people and as an integer for a reduction."""
from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EXIT_INTERVAL = "exit-interval"
EXIT_DURATION = "exit-duration"
_CODES = {None: 0, EXIT_INTERVAL: 1, EXIT_DURATION: 2}
_REASONS = {code: reason for reason, code in _CODES.items()}
_FIRST_SIGNAL_CODE = 100


def encode_reason(reason: str | None) -> int:
    """The reason as an integer; the largest over all ranks is what they agree on (0: nobody stops), so a signal comes before a flag.

    reason: None, EXIT_INTERVAL, EXIT_DURATION or the name of a signal such as "SIGTERM".
    """
    return _CODES[reason] if reason in _CODES else _FIRST_SIGNAL_CODE + signal.Signals[reason]


def decode_reason(code: int) -> str | None:
    """The inverse of `encode_reason`."""
    return _REASONS[code] if code in _REASONS else signal.Signals(code - _FIRST_SIGNAL_CODE).name


@dataclass(frozen=True)
class StopPolicy:
    """When a run stops before its last iteration. All times are of one clock, in seconds."""

    exit_interval: int | None
    exit_duration_in_mins: float | None
    started_at: float

    def reason(self, iteration: int, *, now: float, signal_name: str | None) -> str | None:
        """The reason to stop after `iteration` iterations are finished, or None. The elapsed time differs between ranks, so they must
        agree on it (`encode_reason`)."""
        if signal_name is not None:
            return signal_name
        if self.exit_duration_in_mins and now - self.started_at >= 60 * self.exit_duration_in_mins:
            return EXIT_DURATION
        if self.exit_interval and iteration > 0 and iteration % self.exit_interval == 0:
            return EXIT_INTERVAL
        return None


def watched_signals(exit_signal: str | None) -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT and the one of --exit-signal. ValueError for a name that is none, or a signal that cannot be caught."""
    watched = [signal.SIGTERM, signal.SIGINT]
    if exit_signal:
        names = sorted(s.name for s in signal.valid_signals() if isinstance(s, signal.Signals) and s.name not in ("SIGKILL", "SIGSTOP"))
        if exit_signal not in names:
            raise ValueError(f"--exit-signal {exit_signal}: not a signal that a process can catch; set one of {', '.join(names)}")
        watched.append(signal.Signals[exit_signal])
    return tuple(dict.fromkeys(watched))


class SignalWatcher:
    """Records stop signals while it is entered; the loop reads `requested` between steps.

    A second Ctrl-C ends the process at once with status 130, even when the main thread waits in a collective that will never finish: a
    thread of its own reads the signals from a socket that the C handler writes to.

        with SignalWatcher(exit_signal="SIGUSR1") as signals:
            while signals.requested is None: ...

    on_request  is called once, with the signal's name, from that thread: to say that the step is being finished
    on_abort    is called before a second Ctrl-C ends the process: to leave a last word
    """

    # torchrun passes on a Ctrl-C that the terminal has already sent to every process, within milliseconds: one key, two signals.
    SAME_KEY_SECONDS = 1.0

    def __init__(self, *, exit_signal: str | None = None, on_request: Callable[[str], None] = lambda name: None,
                 on_abort: Callable[[], None] = lambda: None):
        self._signals = watched_signals(exit_signal)
        self._on_request = on_request
        self._on_abort = on_abort
        self._requested: str | None = None
        self._first_interrupt: float | None = None
        self._entered = False

    @property
    def requested(self) -> str | None:
        """The name of the first stop signal that came, or None."""
        return self._requested

    def __enter__(self) -> SignalWatcher:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Signals must have a Python handler for the C handler to be installed; this one has nothing left to do.
        self._former = {s: signal.signal(s, lambda number, frame: None) for s in self._signals}
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._entered = True
        os.register_at_fork(after_in_child=self._leave_child)
        self._thread = threading.Thread(target=self._watch, name="signal watcher", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        # Not only closed: a child that is still there holds a copy, and the thread would wait for its end too.
        self._writer.shutdown(socket.SHUT_WR)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _watch(self) -> None:
        while received := self._reader.recv(64):
            for number in received:
                self._note(number)

    def _note(self, number: int) -> None:
        if number not in self._signals:
            return  # some other signal with a Python handler
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._first_interrupt is not None and now - self._first_interrupt > self.SAME_KEY_SECONDS:
                self._abort()
            self._first_interrupt = self._first_interrupt or now
        if self._requested is None:
            self._requested = signal.Signals(number).name
            self._on_request(self._requested)

    def _abort(self) -> None:
        try:
            self._on_abort()
            sys.stderr.write("interrupted twice: exiting at once\n")
            sys.stderr.flush()
        finally:
            os._exit(128 + signal.SIGINT)

    def _leave_child(self) -> None:
        """A forked child (a data worker) must not write to this socket, and goes on while the run finishes its step: who signals a whole
        group of processes (torchrun, Slurm, systemd, `timeout`) means the parent. SIGTERM ends it when it comes from the parent.
        """
        if not self._entered:
            return
        signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        if hasattr(signal, "sigwaitinfo"):  # macOS has none, and a signal does not say there who sent it
            # Blocked in every thread to come, and before torch's loader sets a handler of its own, which would let it kill.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_by_parent, name="termination", daemon=True).start()


def _end_by_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    # A status other than 0 would be taken for a worker's failure.
    os._exit(0)
