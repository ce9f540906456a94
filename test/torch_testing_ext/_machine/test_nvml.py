"""What NVML says, through the process that asks it. The library itself is a stand-in; see `recorded_nvml`.

The real one is covered by the checks `masks` and `topology` of benchmarks/gpu/run.
"""

import ast
import importlib.util
import os
import signal
import sys
import unittest
from pathlib import Path

from kit.nvml import GB, STAND_IN, Device, Machine, NvmlTestCase, environment, uuid

from torch_testing_ext._machine.nvml import (
    ComputeMode,
    Gpu,
    GpuProcess,
    Nvml,
    Usage,
    open_nvml,
)
from torch_testing_ext._process.questions import NoAnswer, Silence


class TestNvml(NvmlTestCase):
    """Every test covers without a GPU what the checks `masks` and `topology` of benchmarks/gpu/run do with one."""

    def open(self, machine, timeout=30.0):
        machine.write(self.file)
        nvml = Nvml(timeout, [str(STAND_IN), *sys.path], {**os.environ, **environment(self.file)})
        self.addCleanup(nvml.close)
        return nvml

    def test_everything_about_a_gpu(self):
        """Covered on a GPU by the checks `masks` and `topology`."""
        first = Device(uuid(0), compute_mode=3)
        second = Device(uuid(1), "NVIDIA A100", 40 * GB, capability=(8, 0), compute_mode=2)
        nvml = self.open(Machine([first, second], nvlinks=[[0, 1]]))
        self.assertEqual(
            (
                Gpu(
                    0,
                    uuid(0),
                    "NVIDIA H100 80GB HBM3",
                    80 * GB,
                    (9, 0),
                    ComputeMode.EXCLUSIVE_PROCESS,
                    frozenset([uuid(1)]),
                ),
                Gpu(
                    1,
                    uuid(1),
                    "NVIDIA A100",
                    40 * GB,
                    (8, 0),
                    ComputeMode.PROHIBITED,
                    nvlinks=frozenset([uuid(0)]),
                ),
            ),
            nvml.gpus(),
        )

    def test_usage_is_asked_each_time(self):
        """Covered on a GPU by the check `masks`."""
        machine = Machine([Device(uuid(0), used=3 * GB, processes=[{"pid": 77, "usedGpuMemory": 2 * GB}])])
        nvml = self.open(machine)
        self.assertEqual({uuid(0): Usage(3 * GB, (GpuProcess(77, 2 * GB),))}, nvml.usage())

        machine.gpus = [Device(uuid(0), processes=[{"pid": 78, "usedGpuMemory": None}])]
        machine.write(self.file)
        self.assertEqual({uuid(0): Usage(0, (GpuProcess(78, None),))}, nvml.usage())

    def test_one_lost_gpu_does_not_hide_the_others(self):
        """No check of benchmarks/gpu/run loses a GPU."""
        machine = Machine([Device(uuid(0)), Device(uuid(1), used=7)])
        nvml = self.open(machine)
        nvml.gpus()
        machine.gpus[0].trouble = "GPU is lost"
        machine.write(self.file)
        self.assertEqual({uuid(0): Usage(None, (), "GPU is lost"), uuid(1): Usage(7)}, nvml.usage())

    def test_what_a_driver_does_not_support_is_left_out(self):
        """Covered on a GPU by the check `topology`."""
        unsupported = dict.fromkeys(("nvmlDeviceGetP2PStatus", "nvmlDeviceGetComputeMode"), "Not Supported")
        nvml = self.open(Machine([Device(uuid(0)), Device(uuid(1))], fails_in=unsupported))
        self.assertEqual([frozenset(), frozenset()], [gpu.nvlinks for gpu in nvml.gpus()])

    def test_a_driver_that_fails_is_one_line(self):
        """Covered without a driver, and with one by the check `masks`."""
        nvml = self.open(Machine([], fails_in={"nvmlInit": "Driver Not\nLoaded"}))
        for ask in (nvml.gpus, nvml.usage):
            with self.assertRaises(NoAnswer) as caught:
                ask()
            self.assertEqual("NVML: Driver Not Loaded", str(caught.exception))

    def test_a_driver_that_does_not_answer(self):
        """No check of benchmarks/gpu/run stops the driver."""
        for function in ("nvmlInit", "nvmlDeviceGetMemoryInfo"):
            with self.subTest(function):
                nvml = self.open(Machine([Device(uuid(0))], hangs_in=function), timeout=1.0)
                with self.assertRaisesRegex(NoAnswer, "the NVIDIA driver has not answered within 1 s") as late:
                    nvml.usage()
                self.assertIs(late.exception.silence, Silence.LATE)
                with self.assertRaisesRegex(NoAnswer, "has not answered"):  # at once: it is not asked again
                    nvml.usage()

    def test_the_process_that_asks_dies(self):
        """No check of benchmarks/gpu/run kills it."""
        nvml = self.open(Machine([Device(uuid(0))]))
        nvml.usage()
        os.kill(nvml._process.ask(os.getpid), signal.SIGKILL)
        with self.assertRaisesRegex(NoAnswer, "the process that asks the NVIDIA driver was killed by SIGKILL") as died:
            nvml.usage()
        self.assertIs(died.exception.silence, Silence.ENDED)

    def test_without_the_package_or_the_driver(self):
        """On a GPU, the check `masks` opens it."""
        if Path("/dev/nvidiactl").exists():
            self.skipTest("this machine has a driver")
        with self.assertRaisesRegex(NoAnswer, "nvidia-ml-py is not installed|NVML: "):
            open_nvml()


class TestStandIn(unittest.TestCase):
    """The stand-in has no function that the real library lacks, and we call none that the stand-in lacks."""

    def test_names(self):
        if importlib.util.find_spec("pynvml") is None:
            self.skipTest("nvidia-ml-py is not installed")
        import pynvml

        functions = {
            node.name: node for node in ast.parse((STAND_IN / "pynvml.py").read_text()).body if hasattr(node, "name")
        }
        for name, function in functions.items():
            if name.startswith("nvml"):
                real = getattr(pynvml, name)
                most = len(function.args.args) - 1  # all but the machine
                with self.subTest(name):
                    self.assertLessEqual(_fewest(real), most)
                    self.assertGreaterEqual(_most(real), most)

    def test_uses(self):
        import torch_testing_ext._machine.nvml.library as ours

        used = {
            node.attr
            for node in ast.walk(ast.parse(Path(ours.__file__).read_text()))
            if isinstance(node, ast.Attribute) and node.attr.lower().startswith("nvml")
        }
        ours_has = set((STAND_IN / "pynvml.py").read_text().replace("(", " ").split())
        self.assertGreater(len(used), 10)
        self.assertEqual(set(), used - ours_has)


def _fewest(function):
    code = getattr(function, "__wrapped__", function).__code__
    return 0 if code.co_flags & 4 else code.co_argcount - len(function.__defaults__ or ())


def _most(function):
    code = getattr(function, "__wrapped__", function).__code__
    return 99 if code.co_flags & 4 else code.co_argcount


if __name__ == "__main__":
    unittest.main()
