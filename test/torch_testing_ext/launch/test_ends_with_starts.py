"""Tests that the end of a rank counts which is received while its starter still waits for the message of its start."""

from unittest import mock

import pytest
from kit.outcomes import outcome_of
from kit.ranks import Ranks

from torch_testing_ext._process import system
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.faults import fault_point, faults, incarnation, kill, mark, restart
from torch_testing_ext.launch.fork_server_client import Run
from torch_testing_ext.worlds import check_world


@pytest.fixture(autouse=True)
def ends_come_with_starts():
    """Keep whoever starts a rank until that rank has ended."""
    start = Run._start

    def start_and_see_end(run, rank, job):
        start(run, rank, job)
        run.wait_until(lambda: rank in run.exits)

    with mock.patch.object(Run, "_start", start_and_see_end):
        yield


@pytest.mark.parametrize("cores", [1, 2])
def test_ranks_in_turns(cores):
    with mock.patch.object(system, "cores", lambda: cores):
        check_world(lambda rank, world_size: None, 3, timeout=20)


class Restarts(Ranks):
    @faults(kill(1, at=mark("there")), restart(1), within=20)
    def again(self):
        if not incarnation():
            fault_point("there")


def test_a_rank_that_starts_again():
    assert outcome_of(Restarts("again")).outcome == "passed"


if __name__ == "__main__":
    run_tests()
