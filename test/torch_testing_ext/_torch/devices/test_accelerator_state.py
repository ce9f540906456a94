"""Accelerators that torch knows, and those that this process uses."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kit.own_process import in_own_process

from torch_testing_ext._torch.devices import accelerator_state


def modules(**states):
    """Modules of devices by type, each initialised or not, or without an answer."""
    made = {
        kind: SimpleNamespace()
        if state is None
        else SimpleNamespace(is_initialized=lambda state=state: state, _is_in_bad_fork=lambda state=state: state)
        for kind, state in states.items()
    }
    return mock.patch.object(accelerator_state, "device_modules", lambda: made)


@pytest.mark.parametrize(
    ("states", "expected"),
    [({}, None), ({"cuda": False, "hpu": None}, None), ({"cuda": False, "xpu": True}, "xpu"), ({"hpu": True}, "hpu")],
)
def test_initialised(states, expected):
    with modules(**states):
        assert accelerator_state.initialised_type() == expected
        assert accelerator_state.accelerator_is_initialised() is (expected is not None)
        assert accelerator_state.accelerator_is_in_bad_fork() is (expected is not None)


def test_modules():
    """MTIA's counts only in a torch that is built for it."""
    found = accelerator_state.device_modules()
    assert found["cuda"] is torch.cuda and found["xpu"] is torch.xpu
    assert ("mtia" in found) is torch._C._mtia_isBuilt() and "hpu" not in found
    with mock.patch.object(torch._C, "_mtia_isBuilt", lambda: True):
        assert accelerator_state.device_modules()["mtia"] is torch.mtia


@in_own_process
def test_extensions():
    assert accelerator_state.extension_device_type() == "privateuseone"
    module = SimpleNamespace(is_initialized=lambda: True)
    torch.utils.rename_privateuse1_backend("ours")
    accelerator_state.register_device_module("ours", module)
    assert torch.ours is module and accelerator_state.device_modules()["ours"] is module
    assert accelerator_state.initialised_type() == "ours"
