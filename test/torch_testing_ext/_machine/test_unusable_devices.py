"""Devices that NVML counts and CUDA cannot use: of a driver that is too old for torch, and in MIG mode.

torch is made to say what it says on such machines, in a process that is forked for each test.
"""

import os
import types
import unittest
import warnings
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from kit.with_accelerators import in_a_fork

from torch_testing_ext._machine import accelerators, cuda, flags
from torch_testing_ext._process import ends, fork_safety
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._torch.devices import cuda_state, first_accelerator_use
from torch_testing_ext.runner.processes import fork_parent_messages, preloaded_server

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@contextmanager
def cuda_that_shows(count, by_nvml=2, error="No CUDA GPUs are available"):
    """A machine with CUDA on which the driver shows `count` devices, and NVML knows others."""

    def count_of_driver():
        if not count:
            warnings.warn(f"CUDA initialization: {error}", stacklevel=1)
        return count

    def init():
        if not count:
            raise RuntimeError(error)

    def properties(number):
        if number >= count:
            raise AssertionError("Invalid device id")
        return types.SimpleNamespace(name="H100", total_memory=80 << 30, major=9, minor=0, uuid=f"uuid-{number}")

    # A torch that is built for CUDA would get its own functions back when the noting ends.
    first_accelerator_use.stop_noting()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.version, "cuda", "13.2"),
            (torch._C, "_cuda_getDeviceCount", count_of_driver),
            (torch.cuda, "_is_compiled", lambda: True),
            (torch.cuda, "device_count", lambda: by_nvml),
            (torch.cuda, "is_available", lambda: by_nvml > 0),
            (torch.cuda, "init", init),
            (torch.cuda, "get_device_properties", properties),
            (torch.cuda, "can_device_access_peer", lambda number, other: True),
            (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")),
            (cuda_state, "nccl_version", lambda: (2, 29, 7)),
            (accelerators, "device_may_exist", lambda *_: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        accelerators._answer.cache_clear()
        flags.flag.cache_clear()
        first_accelerator_use._noted = None
        yield


def counted():
    """What the preloaded server answers a run."""
    own, other = socket_pair()
    pid = fork_safety.fork()
    if pid == 0:
        preloaded_server._count_devices(Channel(other, fork_parent_messages.Nothing))
    other.close()
    channel = Channel(own, fork_parent_messages.DevicesCounted)
    (answer,) = channel.receive()
    channel.close()
    return answer, ends.wait_for_exit(pid)


class TestCounting(unittest.TestCase):
    @in_a_fork
    def test_a_driver_that_is_too_old(self):
        with cuda_that_shows(0, error=TOO_OLD):
            answer, code = counted()
            self.assertEqual((answer.kind, answer.count, answer.facts, code), (None, 0, (), 0))
            self.assertEqual(answer.why_none, "The NVIDIA driver on your system is too old (found version 11040)")

    @in_a_fork
    def test_mig_mode(self):
        """NVML counts the GPUs, CUDA shows one instance of one of them."""
        with cuda_that_shows(1):
            answer, code = counted()
            self.assertEqual((answer.kind, answer.count, answer.uuids, code), ("cuda", 1, ("uuid-0",), 0))
            self.assertEqual([facts.name for facts in answer.facts], ["H100"])
            self.assertEqual(answer.why_none, "")

    @in_a_fork
    def test_without_a_runner(self):
        """Conditions are false, and a test skips."""
        with cuda_that_shows(0, error=TOO_OLD):
            self.assertFalse(cuda.SM80OrLater)
            self.assertEqual(accelerators.device_count(), 0)
            self.assertEqual(accelerators.device_facts(), ())

    @in_a_fork
    def test_the_driver_shows_all(self):
        with cuda_that_shows(2):
            answer, _ = counted()
            self.assertEqual((answer.count, [facts.peers for facts in answer.facts]), (2, [(1,), (0,)]))


class TestMaskOfInstances(unittest.TestCase):
    """torch counts MIG instances by the driver, since NVML does not know which are visible."""

    def count_and_note(self, mask):
        with cuda_that_shows(1), mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=mask):
            first_accelerator_use.note_first_use()
            return torch._C._cuda_getDeviceCount(), accelerators.unsafe_to_fork()

    @in_a_fork
    def test_another_process_counts(self):
        self.assertEqual(self.count_and_note("MIG-aa,MIG-bb"), (1, None))

    @in_a_fork
    def test_other_masks_are_left_to_torch(self):
        count, why = self.count_and_note("0")
        self.assertEqual(count, 1)
        self.assertRegex(why, r"^the driver of CUDA is asked for its devices in .*test_unusable_devices.py:\d+$")


if __name__ == "__main__":
    unittest.main()
