"""Tests that leave memory of a fake accelerator to a process that outlives them: run by the runner."""

import os
import select
import subprocess
import sys
import unittest

import torch

from torch_testing_ext.common_distributed import skip_if_lt_x_gpu

HOLD = """
import sys, torch
for line in sys.stdin:
    kept = None
    kept = torch.empty(300 << 20, dtype=torch.uint8, device=line.strip()) if line.strip() else None
    print(flush=True)
"""
# Of the process that imports this file. It sees all devices.
holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def hold(device):
    os.write(holder.stdin.fileno(), f"{device}\n".encode())
    os.read(holder.stdout.fileno(), 1)


def used():
    free, total = torch.fakeacc.mem_get_info(0)
    return total - free


class ReturnTest(unittest.TestCase):
    """On one device, with three slots."""

    @skip_if_lt_x_gpu(1)
    def test_a_leaves_it_for_a_while(self):
        hold("fakeacc:0")
        self.assertEqual(used(), 300 << 20)
        with open("left", "w") as fifo:
            fifo.write(str(os.getpid()))
        open("seen").close()

    @skip_if_lt_x_gpu(1)
    def test_b_waits_until_it_is_back(self):
        self.assertTrue(os.path.exists("freed"))
        self.assertEqual(used(), 0)

    def test_frees_it_when_a_has_ended(self):
        with open("left") as fifo:
            ended = os.pidfd_open(int(fifo.read()))
        open("seen", "w").close()
        select.select([ended], [], [])
        open("freed", "w").close()
        hold("")


class KeepTest(unittest.TestCase):
    """On two devices, one test after the other: the one that needs more is the first."""

    @skip_if_lt_x_gpu(2)
    def test_a_keeps_it(self):
        number = torch.fakeacc.get_device_properties(1).uuid[-1]
        with open("kept", "w") as file:
            file.write(number)
        hold(f"fakeacc:{number}")

    @skip_if_lt_x_gpu(1)
    def test_b_has_the_other_device(self):
        self.assertNotEqual(torch.fakeacc.get_device_properties(0).uuid[-1], open("kept").read())
        self.assertEqual(used(), 0)
