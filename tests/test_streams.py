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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_loaders_that_are_done_in_any_order_leave_the_callers_generator(order: tuple[int, ...]):
    before = torch.get_rng_state()
    loans = [Streams(0, step).around_loader() for step in range(3)]
    for loan in loans:
        loan.__enter__()
    latest = torch.get_rng_state()
    for number in order:
        assert not torch.equal(torch.get_rng_state(), before)
        loans[number].__exit__(None, None, None)
        if 2 not in order[: order.index(number) + 1]:  # the latest one keeps its numbers
            assert torch.equal(torch.get_rng_state(), latest)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_read_for_a_network_gives_the_network_its_numbers_back():
    other = Streams(0, 1).around_loader()
    before = torch.get_rng_state()
    other.__enter__()
    with Streams(0, 2).around_network(torch.device("cpu")):
        expected = torch.rand(2)
    with Streams(0, 2).around_network(torch.device("cpu")):
        with Streams(0, 3).around_loader():
            torch.rand(5)
        assert torch.equal(torch.rand(2), expected)
    other.__exit__(None, None, None)
    assert torch.equal(torch.get_rng_state(), before)
