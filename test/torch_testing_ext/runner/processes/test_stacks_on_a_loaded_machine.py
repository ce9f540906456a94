"""Tests that a supervisor waits for stacks until they are written, however late a process gets to it."""

import os
import time
from unittest import mock

import pytest

from torch_testing_ext.launch import grace_periods
from torch_testing_ext.runner.processes import supervisor
from torch_testing_ext.runner.processes.supervisor import Supervisor
from torch_testing_ext.runner.processes.supervisor_messages import StacksTaken

WORKER, RANK = 7, 8


class Clock:
    """Passes while the supervisor sleeps."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def taken():
    """Takes stacks whose files have these sizes after so many seconds. Returns the seconds, and the signals by pid."""

    def take(sizes_after):
        clock, sent = Clock(), []
        began = clock.now

        def sizes_of(pids):
            sizes = sizes_after(clock.now - began)
            return {pid: sizes[pid] for pid in pids if pid in sizes}

        watching = Supervisor.__new__(Supervisor)
        watching.client, watching.children = mock.Mock(), {WORKER: None}
        with (
            mock.patch.object(supervisor, "time", clock),
            mock.patch.object(supervisor.system, "descendants", lambda pid: [RANK]),
            mock.patch.object(supervisor, "_handles", lambda pid, number: True),
            mock.patch.object(os, "kill", lambda pid, number: sent.append((pid, number))),
            mock.patch.object(watching, "_sizes_of_stacks", sizes_of),
        ):
            watching._take_stacks()
        watching.client.send.assert_called_once_with(StacksTaken())
        return clock.now - began, [pid for pid, number in sent if number == supervisor.system.DUMP_STACKS_NOW]

    yield take
    # The clock of this process is its own again.
    assert supervisor.time is time


def test_soon(taken):
    seconds, asked_again = taken(lambda after: {WORKER: 90 * (after > 0.01), RANK: 90 * (after > 0.01)})
    assert seconds == pytest.approx(0.1) and asked_again == []


def test_while_others_have_the_cores(taken):
    seconds, asked_again = taken(lambda after: {WORKER: 90 * (after > 0.22), RANK: 90 * (after > 0.01)})
    assert 0.22 < seconds < 0.4 and asked_again == []


def test_while_one_is_in_c(taken):
    """It answers the second signal, and others are not asked again."""
    seconds, asked_again = taken(lambda after: {WORKER: 90 * (after > 1.5), RANK: 90 * (after > 0.01)})
    assert 1.5 < seconds < 1.7 and asked_again == [WORKER]


def test_never(taken):
    seconds, asked_again = taken(lambda after: {WORKER: 0, RANK: 0})
    assert seconds == pytest.approx(grace_periods.FOR_STACKS, abs=0.1) and asked_again == [WORKER, RANK]


def test_a_process_that_has_no_file_for_them_or_ends(taken):
    seconds, _ = taken(lambda after: {WORKER: 90 * (after > 0.01), **({RANK: 0} if after < 0.06 else {})})
    assert seconds < 0.4
