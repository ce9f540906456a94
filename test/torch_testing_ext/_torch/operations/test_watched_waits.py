"""Waits for works and futures are told, also those by a callback or a list of futures."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kit.own_process import error_of, in_own_process
from kit.plain_groups import two_groups, world_of_one

from torch_testing_ext._torch.operations import watched_waits
from torch_testing_ext._torch.operations.watched_waits import WaitListener, hooks, is_waiting_for_work


class Heard(list):
    """What a listener has heard."""

    def listener(self, with_futures=True):
        return WaitListener(
            lambda work: self.append("wait"),
            lambda: self.append("error"),
            self if with_futures else None,
            lambda work, is_complete: self.append(("waited", is_complete)),
        )

    def future_taken(self, work, future):
        self.append("taken")

    def future_used(self, future):
        self.append("used")

    def future_chained(self, future, result):
        self.append(("chained", type(result).__name__))


def work():
    return dist.all_reduce(torch.ones(1), async_op=True)


@in_own_process
def test_waits():
    world_of_one()
    heard, before = Heard(), dist.Work.wait
    hooks.tell(heard.listener())
    one = work()
    assert heard == []
    one.wait()
    assert heard == ["wait", ("waited", True)]
    heard.clear()
    one.synchronize()
    assert heard == ["wait", ("waited", False)]
    heard.clear()
    assert one.is_completed() and heard == ["wait", ("waited", True)]
    hooks.leave()
    work().wait()
    assert len(heard) == 2 and dist.Work.wait is before


@in_own_process
def test_work_that_is_not_complete():
    """Asking is no wait."""
    heard, groups = Heard(), two_groups()
    hooks.tell(heard.listener())
    received = groups[1].recv([torch.ones(1)], 0, 5)
    assert not received.is_completed() and heard == []
    groups[0].send([torch.ones(1)], 1, 5).wait()
    received.wait()
    assert heard == ["wait", ("waited", True)] * 2


@in_own_process
def test_waits_that_raise():
    heard, groups = Heard(), two_groups(0.05)
    hooks.tell(heard.listener())
    received = groups[1].allreduce([torch.ones(1)])
    assert error_of(received.wait)
    assert heard == ["wait", "error", ("waited", False)]
    assert not is_waiting_for_work(threading.get_ident())


@in_own_process
def test_futures():
    world_of_one()
    heard = Heard()
    hooks.tell(heard.listener())
    future = work().get_future()
    assert heard == ["taken"]
    heard.clear()
    future.wait()
    assert future.done() and future.value()
    assert heard == ["used"] * 3
    heard.clear()
    torch.futures.collect_all([future, future])
    assert heard[:2] == ["used"] * 2
    heard.clear()
    # A future that is not done is not used by the question.
    assert not torch.futures.Future().done() and heard == []


@in_own_process
def test_callbacks():
    """One that only computes leaves the wait to whoever waits for its result; another may tell somebody."""
    world_of_one()
    heard, told = Heard(), []
    hooks.tell(heard.listener())
    future = work().get_future()
    heard.clear()
    future.then(lambda done: done.value()[0].div_(2))
    assert ("chained", "Future") in heard
    heard.clear()
    chained = future.then(told.append)
    assert heard == ["used"]
    chained.wait()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (lambda done: torch.add(done.value()[0], 1), True),
        (lambda done: done.wait(), True),
        (lambda done: print(done), False),
        (lambda done: [each.notify() for each in done.value()], False),
        (print, False),
    ],
)
def test_what_only_computes(callback, expected):
    assert watched_waits._only_computes(callback) is expected


@in_own_process
def test_without_futures():
    """Then asking for the future counts as a wait."""
    world_of_one()
    heard = Heard()
    hooks.tell(heard.listener(with_futures=False))
    work().get_future().wait()
    assert heard == ["wait", ("waited", False)]


@in_own_process
def test_several_listeners():
    """One wants futures, for which functions are replaced that the first one has left alone; either may leave."""
    world_of_one()
    first, second = Heard(), Heard()
    of_first = first.listener(with_futures=False)
    hooks.tell(of_first)
    hooks.tell(second.listener())
    work().get_future().wait()
    assert first == ["wait", ("waited", False)] and second == ["taken", "used"]
    hooks.leave(of_first)
    work().wait()
    assert len(first) == 2 and second[2:] == ["wait", ("waited", True)]


@in_own_process
def test_threads_that_wait():
    """Those without a time-out of their own."""
    seen = []
    thread = threading.get_ident()

    class Own(dist.Work):
        def wait(self, timeout=timedelta(0)):
            seen.append(is_waiting_for_work(thread))
            return True

    Own.wait = watched_waits._watched("wait", Own.wait)
    Own().wait()
    Own().wait(timedelta(seconds=5))
    assert seen == [True, False] and not is_waiting_for_work(thread)
