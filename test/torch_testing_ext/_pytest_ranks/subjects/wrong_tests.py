"""Mistakes of newcomers: each test has one, at the line with the comment `here`."""

import pytest
import torch
import torch.distributed as dist

mark = pytest.mark.world_size


@mark("2")  # here
def test_world_size_is_text(dist_env): ...


@mark(2, timeot=3)  # here
def test_argument_misspelt(dist_env): ...


@mark(size=2, devices="gpu")  # here
def test_devices(dist_env): ...


@mark(2, backend="glo")  # here
def test_backend(dist_env): ...


@mark(5000)  # here
def test_too_many(dist_env): ...


@pytest.mark.wrld_size(2)  # here
def test_mark_misspelt(dist_env): ...


@pytest.mark.slow  # here
def test_no_mark(dist_env): ...


@mark(2)  # here
def test_fixture_misspelt(dist_evn): ...


@pytest.fixture(scope="session")
def shared(dist_env):
    return dist_env


@mark(2)  # here
def test_fixture_too_wide(shared): ...


@mark(2)
def test_group_twice(dist_env):
    dist.init_process_group("gloo")  # here


def without_group(rank):
    dist.all_reduce(torch.ones(1))  # here


def test_no_group(spawn):
    spawn(without_group, 2)


@mark(2)
def test_cuda(dist_env):
    torch.ones(2, device="cuda")  # here


@mark(2)
def test_subtest(dist_env, subtests):
    with subtests.test(i=1):
        assert dist_env.rank == 5  # here


def function(rank): ...


def function_of_two(rank, steps): ...


def test_spawn_none(spawn):
    spawn(function, 0)  # here


def test_spawn_devices(spawn):
    spawn(function, 2, devices="gpu")  # here


def test_spawn_lacks(spawn):
    spawn(function_of_two, 2)  # here


def test_spawn_too_much(spawn):
    spawn(function, 2, 10)  # here


def test_no_script(run_script):
    run_script("missing.py")  # here


def test_launcher(run_script):
    run_script(__file__, launcher="mpirun")  # here


def test_operation():
    from torch_testing_ext.faults import call

    call(1, "allreduce")  # here


def test_rank_of_fault():
    from torch_testing_ext.faults import kill

    kill(-1)  # here


def test_fault_without_length():
    from torch_testing_ext.faults import slow

    slow("a while")  # here
