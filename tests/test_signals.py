"""Signals: which are caught, which stay the caller's, and that all is put back."""

import os
import signal
import threading

import pytest

from dflash.signals import SIGNALS, stop_on_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_becomes_a_request_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with stop_on_signals() as request:
        assert not request
        os.kill(os.getpid(), number)
        assert request.signal_number == number
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_the_signals_stay_the_callers() -> None:
    before = {n: signal.getsignal(n) for n in SIGNALS}
    seen: list[object] = []

    def run() -> None:
        with stop_on_signals() as request:
            seen.append(bool(request))
            seen.append({n: signal.getsignal(n) for n in SIGNALS} == before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert seen == [False, True]
