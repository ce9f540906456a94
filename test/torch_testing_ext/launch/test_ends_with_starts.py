"""Tests that the end of a rank counts which is received while its starter still waits for the message of its start."""

import time
from dataclasses import replace
from unittest import mock

import pytest
from kit.outcomes import outcome_of
from kit.ranks import Ranks

from torch_testing_ext._process import system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.faults import fault_point, faults, incarnation, kill, mark, restart
from torch_testing_ext.launch.fork_server_client import CannotStart, ForkServerClient, Run
from torch_testing_ext.launch.fork_server_messages import Exited, StartFailed
from torch_testing_ext.worlds import check_world


@pytest.fixture
def ends_come_with_starts():
    """Keep whoever starts a rank until that rank has ended."""
    start = Run._start

    def start_and_see_end(run, rank, job):
        start(run, rank, job)
        run.wait_until(lambda: rank in run.exits)

    with mock.patch.object(Run, "_start", start_and_see_end):
        yield


@pytest.mark.usefixtures("ends_come_with_starts")
@pytest.mark.parametrize("cores", [1, 2])
def test_ranks_in_turns(cores):
    with mock.patch.object(system, "cores", lambda: cores):
        check_world(lambda rank, world_size: None, 3, timeout=20)


class Restarts(Ranks):
    @faults(kill(1, at=mark("there")), restart(1), within=20)
    def again(self):
        if not incarnation():
            fault_point("there")


@pytest.mark.usefixtures("ends_come_with_starts")
def test_a_rank_that_starts_again():
    assert outcome_of(Restarts("again")).outcome == "passed"


def test_a_start_that_fails(tmp_path):
    """The end of another rank comes in one piece with the message of the failure."""
    has_failed = tmp_path / "has failed"
    start, receive = Run._start, Channel.receive

    def start_without_folder(run, rank, job):
        start(run, rank, job if rank < 2 else replace(job, directory=tmp_path / "missing"))

    def receive_with_end(channel):
        messages = receive(channel)
        if any(isinstance(message, StartFailed) for message in messages):
            has_failed.touch()
            while not any(isinstance(message, Exited) for message in messages):
                messages += receive(channel)
        return messages

    def body(rank, world_size):
        while rank == 1 and not has_failed.exists():
            time.sleep(0.01)

    with (
        mock.patch.object(system, "cores", lambda: 2),
        mock.patch.object(Run, "_start", start_without_folder),
        mock.patch.object(Channel, "receive", receive_with_end),
        mock.patch.object(ForkServerClient, "give_up", side_effect=AssertionError("an end was lost")),
        pytest.raises(CannotStart, match=r"rank 2: .*missing"),
    ):
        check_world(body, 3, timeout=60)


if __name__ == "__main__":
    run_tests()
