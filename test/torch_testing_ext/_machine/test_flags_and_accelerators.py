"""Flags are correct and lazy; counting devices leaves this process safe to fork."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from kit.files import subject
from kit.processes import output_of_python

from torch_testing_ext import common_distributed, common_utils
from torch_testing_ext._machine import accelerators, asked_devices, cuda, cuda_support, cuda_versions, flags
from torch_testing_ext._process import system
from torch_testing_ext._process.questions import By, NoAnswer, Silence, ask_elsewhere
from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext._testing.marks import backend_needs
from torch_testing_ext._torch.devices import accelerator_state, build_options, first_accelerator_use
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests


def run_python(code, **environment):
    """Run code in a new interpreter, and parse its output as JSON."""
    return json.loads(output_of_python("-c", code, **environment))


@pytest.mark.slow
class TestImport(TestCase):
    def test_imports_nothing_heavy_and_asks_no_device(self):
        code = subject(__file__, "imports_of_common_utils.py")
        asked, new = run_python(code)
        self.assertEqual(asked, [])
        self.assertEqual(set(new) - {"torch_testing_ext", "expecttest"} - sys.stdlib_module_names, set())

    def test_a_test_run_imports_no_compiler_and_no_dtensor(self):
        code = subject(__file__, "imports_of_a_test_run.py")
        self.assertEqual(run_python(code), [True, []])


@instantiate_parametrized_tests
class TestFlags(TestCase):
    def setUp(self):
        super().setUp()
        flags.flag.cache_clear()
        self.addCleanup(flags.flag.cache_clear)

    def flag_under(self, name, **environment):
        with mock.patch.dict(os.environ, environment):
            return flags.flag(name)

    @parametrize("name", flags.names_of_flags())
    def test_every_flag_has_a_value(self, name):
        value = getattr(flags, name)
        expected = {"MACOS_VERSION": float, "TEST_PRIVATEUSE1_DEVICE_TYPE": str, "ACCELERATOR_TYPE": (str, type(None))}
        self.assertIsInstance(value, expected.get(name, bool))

    @parametrize(
        "name,variable",
        [
            ("TEST_WITH_ASAN", "PYTORCH_TEST_WITH_ASAN"),
            ("TEST_WITH_DEV_DBG_ASAN", "PYTORCH_TEST_WITH_DEV_DBG_ASAN"),
            ("TEST_WITH_TSAN", "PYTORCH_TEST_WITH_TSAN"),
            ("TEST_WITH_SLOW", "PYTORCH_TEST_WITH_SLOW"),
            ("TEST_SKIP_FAST", "PYTORCH_TEST_SKIP_FAST"),
            ("TEST_WITH_ROCM", "PYTORCH_TEST_WITH_ROCM"),
            ("TEST_WITH_TORCHDYNAMO", "PYTORCH_TEST_WITH_DYNAMO"),
            ("TEST_WITH_TORCHDYNAMO", "PYTORCH_TEST_WITH_INDUCTOR"),
            ("TEST_WITH_TORCHINDUCTOR", "PYTORCH_TEST_WITH_INDUCTOR"),
            ("IS_SANDCASTLE", "SANDCASTLE"),
        ],
        name_fn=lambda name, variable: f"{name}_by_{variable}",
    )
    def test_a_switch_is_on_when_set_to_1(self, name, variable):
        self.assertFalse(self.flag_under(name, **{variable: "0"}))
        flags.flag.cache_clear()
        self.assertTrue(self.flag_under(name, **{variable: "1"}))

    def test_a_variable_that_is_set_wins_over_what_implies_the_flag(self):
        self.assertFalse(
            self.flag_under("TEST_WITH_TORCHDYNAMO", PYTORCH_TEST_WITH_DYNAMO="0", PYTORCH_TEST_WITH_INDUCTOR="1")
        )

    def test_any_text_in_ci_counts(self):
        self.assertTrue(self.flag_under("IS_CI", CI="false"))
        flags.flag.cache_clear()
        self.assertFalse(self.flag_under("IS_CI", CI=""))

    def test_exactly_one_platform(self):
        self.assertEqual([flags.IS_LINUX, flags.IS_MACOS, flags.IS_WINDOWS].count(True), 1)

    def test_a_flag_is_computed_once_and_then_cached(self):
        self.addCleanup(vars(common_utils).pop, "IS_JETSON", None)
        vars(common_utils).pop("IS_JETSON", None)
        asked = mock.Mock(return_value=True)
        with mock.patch.dict(flags._FLAGS, {"IS_JETSON": asked}):
            self.assertTrue(common_utils.IS_JETSON)
            self.assertTrue(common_utils.IS_JETSON)
        asked.assert_called_once_with()

    def test_unknown_names_are_attribute_errors(self):
        for module in (common_utils, flags):
            with self.assertRaisesRegex(AttributeError, f"{module.__name__!r} has no attribute 'TEST_NONSENSE'"):
                module.TEST_NONSENSE  # noqa: B018
        self.assertFalse(hasattr(common_utils, "TEST_NONSENSE"))

    @pytest.mark.slow
    def test_same_as_pytorch(self):
        code = subject(__file__, "flags_of_both.py")
        count, differ = run_python(code)
        self.assertGreater(count, 50)
        self.assertEqual(differ, {})


class TestSharedNames(TestCase):
    """A name of a mirror that is a name of another module."""

    def test_setting_it_and_deleting_it(self):
        before = ranked_test_case.DEFAULT_WORLD_SIZE
        self.addCleanup(setattr, ranked_test_case, "DEFAULT_WORLD_SIZE", before)
        common_distributed.DEFAULT_WORLD_SIZE = 7
        self.assertEqual([ranked_test_case.DEFAULT_WORLD_SIZE, common_distributed.DEFAULT_WORLD_SIZE], [7, 7])
        del common_distributed.DEFAULT_WORLD_SIZE
        self.assertEqual([ranked_test_case.DEFAULT_WORLD_SIZE, common_distributed.DEFAULT_WORLD_SIZE], [before, before])


class TestDevices(TestCase):
    def setUp(self):
        super().setUp()
        self.forget()
        self.addCleanup(self.forget)
        self.open_before = len(os.listdir("/proc/self/fd"))

    def tearDown(self):
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.open_before)
        super().tearDown()

    @staticmethod
    def forget():
        accelerators._answer.cache_clear()

    def pretend(self, **answers):
        """Simulate the answers of a driver in another process: values, or functions that give them there."""
        questions = {name: value if callable(value) else (lambda value=value: value) for name, value in answers.items()}
        for owner, target, value in (
            (accelerators, "device_may_exist", lambda: True),
            (asked_devices, "QUESTIONS", questions),
            # An earlier test in this process may have asked CUDA; the parent would then answer for its child.
            (accelerator_state, "accelerator_is_in_bad_fork", lambda: False),
        ):
            patch = mock.patch.object(owner, target, value)
            patch.start()
            self.addCleanup(patch.stop)

    @unittest.skipIf(any(Path("/dev").glob("nvidia[0-9]*")) or os.path.exists("/dev/kfd"), "there are devices")
    def test_no_device_node_no_process(self):
        with mock.patch.object(os, "fork") as fork, mock.patch.object(subprocess, "Popen") as popen:
            self.assertEqual(accelerators.device_count(), 0)
            self.assertIsNone(accelerators.accelerator_type())
            self.assertFalse(accelerators.peers_have_access())
        fork.assert_not_called()
        popen.assert_not_called()

    def test_a_forked_child_answers(self):
        self.pretend(ask_devices=("cuda", 3))
        with mock.patch.object(subprocess, "Popen") as popen:
            self.assertEqual(accelerators.device_count(), 3)
            self.assertEqual(accelerators.accelerator_type(), "cuda")
        popen.assert_not_called()

    def test_this_process_is_not_the_one_that_asks(self):
        self.pretend(ask_devices=lambda: ("cuda", os.getpid()))
        self.assertNotEqual(accelerators.device_count(), os.getpid())

    def test_asked_once_for_each_mask(self):
        with tempfile.NamedTemporaryFile() as asked:

            def ask():
                with open(asked.name, "a") as file:
                    file.write("asked\n")
                return "cuda", 1 if "CUDA_VISIBLE_DEVICES" in os.environ else 3

            self.pretend(ask_devices=ask)
            with mock.patch.dict(os.environ):
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                self.assertEqual([accelerators.device_count(), accelerators.device_count()], [3, 3])
                os.environ["CUDA_VISIBLE_DEVICES"] = "2"
                self.assertEqual([accelerators.device_count(), accelerators.device_count()], [1, 1])
            self.assertEqual(asked.read().splitlines(), [b"asked"] * 2)

    def test_asked_directly_where_a_context_exists_already(self):
        self.pretend(ask_devices=("cuda", 2))
        with (
            mock.patch.object(accelerator_state, "accelerator_is_initialised", lambda: True),
            mock.patch.object(os, "fork") as fork,
        ):
            self.assertEqual(accelerators.device_count(), 2)
        fork.assert_not_called()

    def test_a_process_that_has_asked_before_asks_again(self):
        parent = os.getpid()
        self.pretend(ask_devices=lambda: ("cuda", os.getpid()))
        with mock.patch.object(accelerator_state, "accelerator_is_in_bad_fork", lambda: os.getpid() != parent):
            self.assertEqual(accelerators.device_count(), parent)

    def asked_elsewhere(self, *answers):
        """The ways in which a question goes to other processes, which have these answers."""
        with mock.patch.object(asked_devices, "ask_elsewhere", side_effect=answers) as ask:
            self.assertEqual(asked_devices.answer_to("ask_devices"), ("cuda", 4))
        return [call.kwargs["by"] for call in ask.call_args_list]

    def test_a_forked_child_of_a_process_that_has_asked_starts_an_interpreter(self):
        self.pretend(ask_devices=("cuda", 0))
        with mock.patch.object(accelerator_state, "accelerator_is_in_bad_fork", lambda: True):
            self.assertEqual(self.asked_elsewhere(("cuda", 4)), [By.INTERPRETER])

    def test_with_threads_a_new_interpreter_is_asked(self):
        self.pretend(ask_devices=("cuda", 0))
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        try:
            self.assertEqual(self.asked_elsewhere(("cuda", 4)), [By.INTERPRETER])
        finally:
            done.set()
            thread.join()

    def test_a_forked_child_that_gives_no_answer(self):
        """A new interpreter is asked, unless the driver is stuck."""
        self.pretend(ask_devices=("cuda", 0))
        for silence in (Silence.ENDED, Silence.REFUSED):
            ways = self.asked_elsewhere(NoAnswer("why", silence), ("cuda", 4))
            self.assertEqual(ways, [By.FORK, By.INTERPRETER])
        with self.assertRaisesRegex(NoAnswer, "is stuck"):
            self.asked_elsewhere(NoAnswer("it is stuck", Silence.LATE))

    @pytest.mark.slow
    def test_a_new_interpreter_answers(self):
        forked, new = (ask_elsewhere(asked_devices._ask, "ask_devices", by=by, who="torch", timeout=120.0) for by in By)
        self.assertEqual(forked, new)

    def test_a_library_that_has_initialised_cuda(self):
        """The driver tells, and forks of the process cannot use devices even when it is not asked again."""
        driver = mock.Mock(**{"cuDeviceGetCount.side_effect": [3, 0]})
        why = []
        with self.process_that_has_used_nothing():
            for loaded in (driver, driver, OSError):
                with mock.patch("ctypes.CDLL", side_effect=[loaded]):
                    why.append(accelerators.unsafe_to_fork())
        self.assertEqual(why, [None, *["a library has initialised CUDA"] * 2])

    def test_a_library_that_has_opened_a_device(self):
        with self.process_that_has_used_nothing("/dev/kfd"):
            self.assertEqual(
                accelerators.unsafe_to_fork(), "a library has initialised an accelerator (/dev/kfd is open)"
            )

    @contextlib.contextmanager
    def process_that_has_used_nothing(self, *opened):
        """As torch knows it, on a machine with devices."""
        untouched = {name: lambda: False for name in ("accelerator_is_initialised", "accelerator_is_in_bad_fork")}
        with (
            mock.patch.multiple(accelerator_state, **untouched),
            mock.patch.object(first_accelerator_use, "first_use", lambda: None),
            mock.patch.multiple(accelerators, device_may_exist=lambda: True, _driver_is_initialised=False),
            mock.patch.object(system, "opened", lambda pid: set(opened)),
        ):
            yield

    def test_only_an_xpu_has_the_number_of_one(self):
        for kind, expected in (("xpu", 0xE20B), ("cuda", 0), (None, 0)):
            self.forget()
            self.pretend(ask_devices=(kind, 1), ask_xpu_id=0xE20B)
            self.assertEqual(accelerators.xpu_device_id(), expected)

    def test_numba_is_asked_for_cuda_only_where_it_is_tested(self):
        numba = mock.Mock(**{"cuda.is_available.return_value": True})
        with mock.patch.dict(sys.modules, {"numba": numba, "numba.cuda": numba.cuda}):
            for tested in (True, False):
                with mock.patch.object(cuda, "flag", {"TEST_NUMBA": tested}.get):
                    self.assertEqual(cuda.numba_supports_cuda(), tested)

    def test_peer_access_is_asked_only_of_several_cuda_devices(self):
        for kind, capability, peers, expected in (
            ("xpu", None, (), False),
            ("cuda", [8, 0], ([1], [0]), True),
            ("cuda", [7, 5], ([1], [0]), False),
            ("cuda", [8, 0], ([1], []), False),
        ):
            with self.subTest(kind=kind, capability=capability, peers=peers):
                facts = [{"name": "", "memory": 1, "capability": capability, "peers": one} for one in peers]
                self.forget()
                self.pretend(ask_devices=(kind, 2), ask_facts=facts)
                self.assertEqual(accelerators.peers_have_access(), expected)


class TestConditions(TestCase):
    """What common_cuda and the flags ask, on machines that are not here."""

    @contextlib.contextmanager
    def on(self, **true):
        """A context in which these flags are true, and no other."""
        with (
            mock.patch.object(cuda, "flag", lambda name: true.get(name, False)),
            mock.patch.object(cuda_support, "flag", lambda name: true.get(name, False)),
        ):
            yield

    def test_nothing_is_asked_of_cuda_without_it(self):
        with self.on(), mock.patch.object(accelerators, "cuda_properties", side_effect=AssertionError):
            answers = [cuda.evaluate_gfx_arch_within(["gfx942"]), cuda._is_jetson(), cuda._has_cudnn()]
            self.assertEqual([*answers, cuda.first_device(), cuda._cudnn_version()], [False] * 3 + [None, 0])
            self.assertFalse(cuda_support.evaluate_platform_supports_flash_attention())

    def test_flash_attention_on_other_devices(self):
        for model, expected in ((0xE20B, True), (0x0BD5, False)):
            with self.on(TEST_XPU=True), mock.patch.object(accelerators, "xpu_device_id", lambda model=model: model):
                self.assertEqual(cuda_support._xpu_has_flash_attention(), expected)
        with mock.patch.object(cuda_support, "PLATFORM_SUPPORTS_FLASH_ATTENTION_XPU", True), self.on(TEST_XPU=True):
            self.assertTrue(cuda_support.evaluate_platform_supports_flash_attention())
            self.assertTrue(cuda_support.evaluate_platform_supports_mx_gemm())
        with self.on(TEST_MTIA=True):
            self.assertTrue(cuda_support.evaluate_platform_supports_flash_attention())

    def test_version_of_magma(self):
        for built_with, expected in (("CUDA 12\n  - Magma 2.6.1\n  - x", (2, 6, 1)), ("", (0, 0))):
            with mock.patch("torch.__config__.show", return_value=built_with):
                self.assertEqual(cuda_versions.magma_version(), expected)

    def test_triton_is_told_of_the_device(self):
        """So that it does not initialise CUDA."""
        answers = {"accelerator_type": lambda: "cuda", "cuda_properties": lambda: {"capability": (9, 0), "arch": ""}}
        # The real one is an import of seconds.
        interface = types.SimpleNamespace(caching_worker_device_properties={})
        with (
            mock.patch.multiple(accelerators, **answers),
            mock.patch.dict(sys.modules, {"torch._dynamo.device_interface": interface}),
            mock.patch("torch_testing_ext._torch.fsdp_parts.has_triton", torch.cuda.get_device_capability),
        ):
            self.assertEqual(cuda.has_triton(), (9, 0))

    def test_numba_that_cannot_be_imported(self):
        with self.on(TEST_NUMBA=True), mock.patch.dict(sys.modules, {"numba": None, "numba.cuda": None}):
            self.assertFalse(cuda.numba_supports_cuda())

    def test_bindings_of_python_on_rocm(self):
        for is_hip in (True, False):
            runtime = types.SimpleNamespace(**({"HIP_PYTHON": True} if is_hip else {}))
            with (
                mock.patch.object(flags, "_module", lambda name: lambda: True),
                mock.patch.multiple(torch.version, cuda=None, hip="6.4"),
                mock.patch.dict(sys.modules, {"cuda.bindings.runtime": runtime, "cuda.bindings": runtime}),
            ):
                self.assertEqual(flags._has_cuda_python_bindings(), is_hip)

    def test_version_of_nccl(self):
        with (
            mock.patch.object(accelerators, "accelerator_type", lambda: "cuda"),
            mock.patch("torch.distributed.is_nccl_available", lambda: True),
            mock.patch.object(backend_needs.c10d, "is_nccl_available", lambda: True),
            mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 20)),
        ):
            for version, skips in (((2, 21), True), ((2, 20), False)):
                decorated = backend_needs.requires_nccl_version(version, "why")(type("Test", (), {}))
                self.assertEqual(getattr(decorated, "__unittest_skip__", False), skips)


class TestDeviceNodes(TestCase):
    def may_exist(self, *nodes, cuda=None, hip=None, **environment):
        with (
            tempfile.TemporaryDirectory() as dev,
            mock.patch.object(torch.version, "cuda", cuda),
            mock.patch.object(torch.version, "hip", hip),
            mock.patch.object(build_options, "other_accelerator_is_built", lambda: False),
        ):
            for node in nodes:
                (Path(dev) / node).touch()
            return accelerators.device_may_exist(Path(dev), environment)

    def test_a_build_without_accelerators_has_none_whatever_the_machine(self):
        self.assertFalse(self.may_exist("nvidiactl", "nvidia0", "kfd"))

    def test_each_kind_of_node_counts(self):
        for node in ("nvidiactl", "nvidia0", "nvidia7", "dxg", "kfd"):
            self.assertTrue(self.may_exist(node, cuda="12.8"), node)
            self.assertTrue(self.may_exist(node, hip="6.4"), node)

    def test_a_machine_without_nodes_has_none(self):
        self.assertFalse(self.may_exist("null", "nvram", cuda="12.8"))

    def test_a_mask_that_hides_all_devices(self):
        for mask in ("", "-1"):
            self.assertFalse(self.may_exist("nvidia0", cuda="12.8", CUDA_VISIBLE_DEVICES=mask))
        self.assertTrue(self.may_exist("nvidia0", cuda="12.8", CUDA_VISIBLE_DEVICES="0"))

    def test_other_accelerators_are_asked_for(self):
        with mock.patch.object(build_options, "other_accelerator_is_built", lambda: True):
            self.assertTrue(accelerators.device_may_exist(Path("/nonexistent")))


if __name__ == "__main__":
    run_tests()
