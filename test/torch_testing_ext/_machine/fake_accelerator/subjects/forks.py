"""Forks of processes that have asked for fake accelerators, or used them: run with --fake-accelerators 4."""

import os
import sys
import traceback
from contextlib import contextmanager

import pytest
import torch

DEVICE = "fakeacc:1"


def used():
    """The bytes that all processes of the run have on the device."""
    free, total = torch.fakeacc.mem_get_info(1)
    return total - free


@contextmanager
def fork(do):
    """A context that begins when a forked child has done it, and at whose end the child goes. It must not fail."""
    (done, tell), (wait, go) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            kept = do()
            os.write(tell, b"d")
            os.close(go)
            os.read(wait, 1)
            del kept
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    for end in (tell, wait):
        os.close(end)
    try:
        assert os.read(done, 1) == b"d"
        yield
    finally:
        for end in (done, go):
            os.close(end)
        assert os.waitpid(pid, 0)[1] == 0


def use():
    x = torch.ones(1000, device=DEVICE)
    assert x.sum().item() == 1000
    return x


def ask():
    """What starts nothing, as in torch.cuda with NVML."""
    assert torch.accelerator.device_count() == 4 and torch.fakeacc.is_available()
    assert torch.fakeacc.get_device_properties(1).uuid == "fake-0001"
    torch.manual_seed(1)
    before = used()
    assert not torch.fakeacc.is_initialized()
    return before


def test_forks_of_a_process_that_has_asked_may_use_them():
    """And count what they have for all others."""
    assert ask() == 0
    with fork(use):
        assert used() == 4000
        with fork(use):
            assert used() == 8000
        assert used() == 4000
    assert used() == 0


def test_a_fork_of_a_process_that_has_used_them_may_not():
    def use_and_fork():
        x = use()
        with fork(lambda: fails(x)):
            assert used() == 4000
        return x

    def fails(inherited):
        with pytest.raises(RuntimeError, match="Cannot re-initialize fake accelerators in forked subprocess"):
            use()

    with fork(use_and_fork):
        assert used() == 4000
    assert used() == 0


def test_what_a_fork_frees_is_still_its_parents():
    kept = {}

    def use_and_fork():
        kept["x"] = use()
        with fork(kept.clear):
            assert used() == 4000

    with fork(use_and_fork):
        pass
