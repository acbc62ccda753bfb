"""Signals stop a training between steps, a second one at once, and every handler is put back."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from varlap.errors import ConfigError, Interrupted
from varlap.training.signals import SIGNALS, StopRequests

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
by_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def handlers():
    """Handlers that would not end pytest, and that must be back after each test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    seen = []

    def remember(number, _):
        seen.append(number)

    for number in SIGNALS:
        signal.signal(number, remember)
    yield seen
    after = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == [remember, remember]


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.001)  # so that it is handled here


def run(program: str, **options) -> subprocess.CompletedProcess:
    """Run a program that imports nothing heavy of its own."""
    return subprocess.run(
        [sys.executable, "-c", "import os, signal, time\nfrom varlap.training.signals import StopRequests\n" + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )


@by_signal
def test_the_first_signal_is_remembered_and_the_step_goes_on(number, handlers):
    with StopRequests() as stop:
        assert stop.requested is None
        stop.raise_if_requested(3, saved=True)
        send(number)
        assert stop.requested == number
        with pytest.raises(Interrupted) as caught:
            stop.raise_if_requested(3, saved=True)
    assert caught.value.signal == number
    assert caught.value.exit_status == 128 + number
    assert handlers == []
    send(number)
    assert handlers == [number]


@by_signal
@pytest.mark.parametrize(
    ("second", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["INT", "TERM"]
)
def test_the_second_signal_ends_at_once(number, second, expected):
    with StopRequests() as stop:
        send(number)
        with pytest.raises(expected) as caught:
            send(second)
        assert stop.requested == number
    if expected is SystemExit:
        assert caught.value.code == 143


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_handlers_are_put_back_whatever_happens(error, handlers):
    with pytest.raises(error), StopRequests():
        raise error
    for number in SIGNALS:
        send(number)
    assert handlers == list(SIGNALS)


def test_a_signal_while_leaving_cannot_keep_a_handler_from_being_put_back(monkeypatch):
    real = signal.signal
    with StopRequests():
        send(signal.SIGINT)
        monkeypatch.setattr(signal, "signal", lambda *args: (send(signal.SIGTERM), real(*args))[1])
    monkeypatch.undo()  # the fixture looks at the handlers


def test_a_failure_while_entering_puts_back_what_was_replaced(monkeypatch):
    real = signal.signal

    def fails_for_the_second(number, handler):
        if number == SIGNALS[1] and getattr(handler, "__name__", "") == "_handle":
            raise ValueError("no more handlers")
        return real(number, handler)

    monkeypatch.setattr(signal, "signal", fails_for_the_second)
    with pytest.raises(ValueError, match="no more handlers"), StopRequests():
        raise AssertionError
    monkeypatch.undo()


def test_inside_one_another_both_know_of_a_request():
    with StopRequests() as outer:
        with StopRequests() as inner:
            send(signal.SIGTERM)
            assert inner.requested == outer.requested == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        with StopRequests() as later:
            assert later.requested is None
            send(signal.SIGINT)
            assert later.requested == signal.SIGINT
        assert outer.requested == signal.SIGTERM, "the first one"


def test_one_can_be_used_again_but_not_inside_itself():
    stop = StopRequests()
    with stop:
        send(signal.SIGINT)
        with pytest.raises(ConfigError, match="in use already"):
            stop.__enter__()
    assert stop.requested == signal.SIGINT
    with stop:
        assert stop.requested is None


def test_in_another_thread_nothing_is_touched(handlers):
    before = [signal.getsignal(number) for number in SIGNALS]
    seen = []

    def work():
        with StopRequests() as stop:
            seen.append([signal.getsignal(number) for number in SIGNALS])
            stop.raise_if_requested(1, saved=False)
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, None]


@by_signal
def test_a_signal_that_is_ignored_stays_ignored(number):
    old = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequests() as stop:
            send(number)
            assert stop.requested is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, old)


def test_the_default_handlers_are_put_back():
    done = run(
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "with StopRequests() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert stop.requested == signal.SIGTERM\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "print('still here', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)"
    )
    assert done.stdout == "still here\n", done.stderr
    assert done.returncode == -signal.SIGTERM


@by_signal
def test_a_program_is_stopped_from_outside_after_its_step(number):
    program = (
        "import sys\nfrom varlap.errors import Interrupted\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    with StopRequests() as stop:\n"
        "        print('ready', flush=True)\n"
        "        for step in range(10_000):\n"
        "            time.sleep(0.01)\n"
        "            stop.raise_if_requested(step, saved=True)\n"
        "except Interrupted as error:\n"
        "    print(error, flush=True)\n"
        "    sys.exit(error.exit_status)\n"
    )
    prelude = "import os, signal, time\nfrom varlap.training.signals import StopRequests\n"
    process = subprocess.Popen([sys.executable, "-c", prelude + program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    assert f"{number.name} stopped the training; a checkpoint was saved at step" in out


def test_forked_workers_end_on_sigterm_and_outlast_ctrl_c():
    done = run(
        "with StopRequests() as stop:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try:\n"
        "            time.sleep(60)\n"
        "        finally:\n"
        "            os._exit(7)\n"
        "    time.sleep(0.2)\n"
        "    for _ in range(2):\n"
        "        os.kill(child, signal.SIGINT)\n"
        "        time.sleep(0.1)\n"
        "    assert os.waitpid(child, os.WNOHANG) == (0, 0), 'ended by Ctrl-C'\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    _, status = os.waitpid(child, 0)\n"
        "    assert os.WTERMSIG(status) == signal.SIGTERM, status\n"
        "    assert stop.requested is None\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            True,
            "SIGTERM stopped the training; "
            "a checkpoint was saved at step 120 and the same command carries on from there",
        ),
        (
            False,
            "SIGTERM stopped the training; "
            "the weights of step 120 are in the network alone, and nothing carries on from there; train with a run "
            "folder, fit(..., out=...), to keep them",
        ),
    ],
)
def test_the_error_says_what_was_saved_and_survives_pickling(saved, message):
    error = pickle.loads(pickle.dumps(Interrupted(signal.SIGTERM, 120, saved)))
    assert str(error) == message
    assert (error.signal, error.step, error.saved, error.exit_status) == (15, 120, saved, 143)


def test_a_signal_without_a_name_is_named_by_its_number():
    assert str(Interrupted(99, 1, True)).startswith("signal 99 stopped")
