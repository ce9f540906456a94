"""The first line that uses an accelerator is noted, once, and torch's functions are put back."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from kit.own_process import in_own_process

from torch_testing_ext._torch.devices import first_accelerator_use as first_use


def forget():
    """Be as a process in which nothing has used an accelerator: a file of tests may have asked for it at its import."""
    first_use.stop_noting()
    first_use._noted = None


def watch(**entrances):
    """Watch these functions of torch, as it would have them if it were built for accelerators."""
    forget()
    for name, function in entrances.items():
        setattr(torch._C, name, function)
    first_use.note_first_use()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("_cuda_init", f"{first_use._CUDA} is initialised"),
        ("_cuda_getDeviceCount", f"the driver of {first_use._CUDA} is asked for its devices"),
        ("_xpu_init", "XPU is initialised"),
    ],
)
@in_own_process
def test_first_use(name, what):
    called = []
    watch(**{name: lambda *args: called.append(args) or 5})
    entrance = getattr(torch._C, name)
    assert first_use.first_use() is None
    assert entrance(1) == 5
    line = sys._getframe().f_lineno - 1
    assert first_use.first_use() == f"{what} in {os.path.relpath(__file__)}:{line}"
    assert getattr(torch._C, name) is entrance.__wrapped__
    # The first one counts, and its caller may have kept the function.
    assert entrance(2) == 5 and called == [(1,), (2,)]
    assert first_use.first_use().endswith(f":{line}")
    first_use.note_first_use()
    assert getattr(torch._C, name) is entrance.__wrapped__


@in_own_process
def test_numbers_of_masked_instances():
    """They are counted in another process, since torch would ask the driver."""
    watch(_cuda_getDeviceCount=lambda: 7)
    first_use.count_elsewhere = lambda: 2
    os.environ["CUDA_VISIBLE_DEVICES"] = "MIG-1234"
    assert torch._C._cuda_getDeviceCount() == 2 and first_use.first_use() is None
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    assert torch._C._cuda_getDeviceCount() == 7 and first_use.first_use() is not None


@in_own_process
def test_extensions():
    """Also one that is imported later."""
    watch()
    torch.utils.rename_privateuse1_backend("ours")
    torch._register_device_module("ours", module := SimpleNamespace(_lazy_init=lambda: 3, init=lambda: 4))
    assert module._lazy_init() == 3
    assert first_use.first_use().startswith("ours is initialised in ")


@in_own_process
def test_ranks_have_nothing_to_note():
    watch()
    register = torch._register_device_module
    first_use.stop_noting()
    assert torch._register_device_module is register.__wrapped__ and first_use.first_use() is None


@in_own_process
def test_earlier_use():
    forget()
    torch.cuda.is_initialized = lambda: True
    first_use.note_first_use()
    assert first_use.first_use() == "an accelerator was initialised before torch_testing_ext was imported"


@in_own_process
def test_places():
    """Short where they are below the working folder, whole elsewhere and where there is none."""
    assert first_use._shortened("/x/y.py") == "/x/y.py" and first_use._shortened("<string>") == "<string>"
    folder = os.path.join("/tmp", f"gone{os.getpid()}")
    os.mkdir(folder)
    os.chdir(folder)
    os.rmdir(folder)
    assert first_use._shortened("y.py") == "y.py"
