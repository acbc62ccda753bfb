"""What draws from the whole process's generators draws alone, and a forked process is not kept waiting."""

import multiprocessing
import os
import threading

import pytest
import torch

import varlap
from varlap.streams import Streams


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_forked_while_another_thread_has_the_generators_goes_on():
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with Streams(0, 0).around_network(torch.device("cpu")):
            taken.set()
            done.wait(60)

    bnn = varlap.BNN(torch.nn.Linear(2, 2))
    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(60)
    child = multiprocessing.get_context("fork").Process(target=bnn.predict, args=(torch.ones(1, 2),))
    child.start()
    child.join(30)
    stuck = child.is_alive()
    child.kill()
    done.set()
    thread.join()
    assert not stuck
    assert child.exitcode == 0
