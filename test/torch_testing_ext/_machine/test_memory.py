"""How much memory is in use: what the system's files say, and the memory of real processes."""

import os
import subprocess
import sys
import unittest

from kit.files import FolderCase

from torch_testing_ext._machine.machine_memory import MachineMemory, MemoryUse, memory_of
from torch_testing_ext.common_utils import run_tests

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"
V1 = "12:cpu,cpuacct:/x\n4:memory:/job/step\n0::/\n"
LIMIT, USAGE = "memory.limit_in_bytes", "memory.usage_in_bytes"


class TestMachineMemory(FolderCase):
    def write_group(self, folder, **numbers):
        for name, text in numbers.items():
            self.write(f"sys/fs/cgroup/{folder}/memory.{name}", str(text))

    def check(self, used, limit):
        self.assertEqual(MachineMemory(self.root).use(), MemoryUse(used, limit))

    def test_nothing_is_known(self):
        self.assertIsNone(MachineMemory(self.root).use())

    def test_the_machine(self):
        self.write("proc/meminfo", MEMINFO)
        self.check(400 << 10, 1000 << 10)

    def test_version_2(self):
        """Files in the cache, and what the kernel can free, are not in use."""
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/self/cgroup", "0::/job/step\n")
        self.write_group("job/step", max="max\n", current="900\n")
        stat = "anon 5\ninactive_file 100\nactive_file 50\nslab_reclaimable 25\nslab_unreclaimable 7\n"
        self.write_group("job", max="1000\n", current="900\n", stat=stat)
        self.check(725, 1000)

    def test_the_group_closest_to_its_limit(self):
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/self/cgroup", "0::/job/step\n")
        for folder, most in {"job/step": 1000, "job": 600, "other": 500}.items():
            self.write_group(folder, max=most, current=500)
        self.check(500, 600)

    def test_version_1(self):
        self.write("proc/self/cgroup", V1)
        self.write_group("memory/job/step", limit_in_bytes=1000, usage_in_bytes=900)
        self.write_group("memory/job/step", stat="inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n")
        self.check(750, 1000)

    def test_version_1_in_a_container(self):
        """The path is that of the host, and what the container sees is the mount itself."""
        self.write("proc/self/cgroup", V1)
        self.write_group("memory", limit_in_bytes=1000, usage_in_bytes=900)
        self.check(900, 1000)

    def test_odd_files(self):
        self.write("proc/meminfo", "MemTotal: many kB\nMemAvailable:\n")
        self.write("proc/self/cgroup", "0::/\n")
        for most in "", "0", "-1", "max", "odd":
            with self.subTest(most=most):
                self.write_group("", max=most, current=900)
                self.assertIsNone(MachineMemory(self.root).use())

    def test_this_machine(self):
        use = MachineMemory().use()
        self.assertIsNotNone(use)
        self.assertTrue(0.0 < use.share <= 1.0)

    def test_words(self):
        self.assertEqual(str(MemoryUse(91 << 28, 100 << 28)), "91 % of its 25.0 GiB of memory")


class TestMemoryOfProcesses(unittest.TestCase):
    def test_memory_that_is_shared_counts_once(self):
        """A process and its fork, which share what the first one has."""
        source = "import os; x = b'x' * (100 << 20); pid = os.fork(); pid and print(pid, flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            pids = [process.pid, int(process.stdout.readline())]
            used = memory_of(pids)
            alone = memory_of(pids[:1])
            process.stdin.close()
        self.assertTrue(100 << 20 < used < 160 << 20, used)
        self.assertTrue(50 << 20 < alone < 90 << 20, alone)

    def test_a_process_that_is_gone(self):
        process = subprocess.Popen([sys.executable, "-c", "pass"])
        process.wait()
        self.assertEqual(memory_of([process.pid]), 0)
        self.assertGreater(memory_of([process.pid, os.getpid()]), 1 << 20)


if __name__ == "__main__":
    run_tests()
