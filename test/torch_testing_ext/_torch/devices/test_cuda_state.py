"""CUDA's memory, libraries and device numbers, on a torch that has none."""

import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.devices import cuda_state


@pytest.mark.slow  # imports the compiler
@in_own_process
def test_description():
    """torch is told of a device that it does not initialise, and of no device after that."""
    import torch._dynamo.device_interface as interface

    properties = torch.cuda.get_device_properties
    known = dict(interface.caching_worker_device_properties)
    with cuda_state.describing_device((9, 0, 1), "gfx90a"):
        assert torch.cuda.current_device() == 0 and torch.cuda.get_device_capability() == (9, 0)
        found = torch.cuda.get_device_properties(0)
        assert (found.major, found.minor, found.gcnArchName) == (9, 0, "gfx90a")
        interface.caching_worker_device_properties["cuda"] = ["ours"]
    assert torch.cuda.get_device_properties is properties and not torch.cuda.is_initialized()
    assert interface.caching_worker_device_properties == known


@in_own_process
def test_device_numbers():
    """A rank may name a device by its own number, in each way that selects one."""
    selected = []
    torch.cuda.set_device = lambda device: selected.append(device)
    torch.accelerator.set_device_index = lambda device, /: selected.append(device)
    torch.cuda.device.__init__ = lambda self, device: selected.append(device)
    torch.Tensor.cuda = lambda self, device=None: selected.append(device)
    for _ in range(2):
        cuda_state.fold_device_numbers(2, "cuda")
    torch.cuda.set_device(5)
    torch.cuda.set_device(device="cuda:4")
    torch.cuda.set_device(torch.device("cuda", 3))
    torch.accelerator.set_device_index(7)
    torch.cuda.device(9)
    torch.ones(1).cuda(11)
    torch.ones(1).cuda(device=2)
    assert selected == [1, 0, 1, 1, 1, 1, 0]
    selected.clear()
    # These name no other device.
    for device in (-1, None, "cpu", "cuda"):
        torch.cuda.set_device(device)
    assert selected == [-1, None, "cpu", "cuda"]
    assert torch.cuda.set_device.__wrapped__.__name__ == "<lambda>"


def test_usable_devices():
    with mock.patch.object(torch._C, "_cuda_getDeviceCount", lambda: 3, create=True):
        assert cuda_state.usable_devices("cuda") == 3
    with mock.patch.object(torch.accelerator, "device_count", lambda: 5):
        assert cuda_state.usable_devices("xpu") == 5


def test_why_cuda_is_unusable():
    def fail():
        raise RuntimeError("The driver is too old (found 1.2). Please update it.\nSee the docs.")

    with mock.patch.object(torch.cuda, "init", fail):
        assert cuda_state.why_cuda_is_unusable() == "The driver is too old (found 1.2)"
    with mock.patch.object(torch.cuda, "init", mock.Mock(side_effect=KeyError())):
        assert cuda_state.why_cuda_is_unusable() == "KeyError"
    with mock.patch.object(torch.cuda, "init", lambda: None):
        assert cuda_state.why_cuda_is_unusable() == ""


def test_first_use():
    called = []
    with mock.patch.object(torch.cuda, "_lazy_call", lambda call: called.append(call)):
        cuda_state.when_cuda_is_first_used(test_first_use)
    assert called == [test_first_use]


def test_libraries():
    called = []
    names = ("_cuda_resetCublasWorkspaceSize", "_cuda_clearCublasWorkspaces")
    calls = {name: lambda name=name: called.append(name) for name in names}
    with mock.patch.multiple(torch._C, create=True, **calls):
        cuda_state.forget_blas_workspaces()
    # A size that is reset counts only for workspaces that are made after it.
    assert [*called] == [*names]
    for answer in (False, True):
        name = "_cuda_cudaCachingAllocator_is_enabled"
        with mock.patch.object(torch._C, name, lambda answer=answer: answer, create=True):
            assert cuda_state.caching_allocator_is_enabled() is answer
    with mock.patch.object(dist, "is_nccl_available", lambda: False):
        assert cuda_state.nccl_version() == ()
    nccl = SimpleNamespace(version=lambda: (2, 27, 5, "suffix"))
    with mock.patch.object(dist, "is_nccl_available", lambda: True), mock.patch.object(torch.cuda, "nccl", nccl):
        assert cuda_state.nccl_version() == (2, 27, 5)


def test_busy_devices():
    slept = []
    with mock.patch.object(torch.cuda, "_sleep", slept.append):
        cuda_state.keep_busy("cuda", 1000)
    assert slept == [1000]


class Memory:
    """A module of devices that counts memory."""

    def __init__(self, *peaks):
        self._peaks, self.reset = peaks, []

    def device_count(self):
        return len(self._peaks)

    def max_memory_allocated(self, number):
        return self._peaks[number][0]

    def max_memory_reserved(self, number):
        return self._peaks[number][1]

    def reset_peak_memory_stats(self, number):
        self.reset.append(number)


@pytest.mark.parametrize(
    ("kind", "bad_fork", "module", "expected"),
    [
        ("cuda", False, Memory((5, 8), (0, 0), (1, 2)), {0: (5, 8), 2: (1, 2)}),
        (None, False, Memory((5, 8)), {}),
        ("cuda", True, Memory((5, 8)), {}),
        ("cuda", False, SimpleNamespace(device_count=lambda: 1), {}),
    ],
)
def test_peak_memory(kind, bad_fork, module, expected):
    parts = {
        "initialised_type": lambda: kind,
        "accelerator_is_in_bad_fork": lambda: bad_fork,
        "device_modules": lambda: {"cuda": module},
    }
    with mock.patch.multiple(cuda_state, **parts):
        assert cuda_state.peak_memory() == expected
        cuda_state.forget_peak_memory()
    assert getattr(module, "reset", []) == ([0, 1, 2] if expected else [])


@in_own_process
def test_gathered_lists():
    """gloo gathers the tensors of a list one after the other."""
    from torch.distributed._functional_collectives import all_gather_into_tensor_coalesced

    assert cuda_state.gather_lists_one_by_one("CPU") is cuda_state.gather_lists_one_by_one("CPU")
    world_of_one()
    group = dist.group.WORLD
    gathered = all_gather_into_tensor_coalesced([torch.arange(3.0), torch.ones(2)], group)
    assert [one.tolist() for one in gathered] == [[0, 1, 2], [1, 1]]
    dump = torch._C._distributed_c10d._dump_fr_trace(True, False, False)
    assert len(pickle.loads(dump)["entries"]) == 2
