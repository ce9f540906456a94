"""The questions that another process answers, and what tests conclude from the answers: torch is told what it has.

On real devices: the checks `needs` and `fork-survives` of benchmarks/gpu/run.
"""

import contextlib
import types
import unittest
from unittest import mock

import torch

from torch_testing_ext._machine import accelerators, cuda, device_questions
from torch_testing_ext._testing.marks import device_cycles, failures_by_architecture, needs, skips_by_architecture
from torch_testing_ext._torch import fsdp_parts
from torch_testing_ext._torch.devices import build_options, cuda_state

ARCHS = ("gfx942:sramecc+", "gfx1100")


@contextlib.contextmanager
def has(**answers):
    """A machine on which these questions have these answers."""
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            module = device_questions if hasattr(device_questions, name) else accelerators
            stack.enter_context(mock.patch.object(module, name, mock.Mock(return_value=answer)))
        yield


def skips_because(decorated):
    """Why a test skips; empty if it runs."""
    unmet = needs.first_unmet(decorated)
    if unmet is not None:
        return unmet.message
    try:
        decorated(types.SimpleNamespace())
    except unittest.SkipTest as skip:
        return str(skip)
    return ""


class TestAnswers(unittest.TestCase):
    def test_nothing_to_say_without_devices(self):
        with has(ask_devices=device_questions.NO_DEVICE):
            self.assertEqual(
                (device_questions.ask_uuids(), device_questions.ask_facts(), device_questions.ask_cuda_properties()),
                ([], [], {}),
            )

    def test_properties_of_two_devices_of_cuda(self):
        def properties(number):
            return types.SimpleNamespace(gcnArchName=ARCHS[number])

        device = mock.Mock(
            get_device_properties=properties,
            get_device_capability=lambda number=0: (9, number),
            has_magma=1,
            is_tf32_supported=lambda: True,
        )
        cudnn = mock.Mock(is_acceptable=lambda tensor: tensor == "on cuda", version=lambda: None)
        with (
            has(ask_devices=("cuda", 2), _has_multicast=True),
            mock.patch.object(torch, "cuda", device),
            mock.patch.object(torch.backends, "cudnn", cudnn),
            mock.patch.object(torch, "ones", lambda shape, device: f"on {device}"),
        ):
            found = device_questions.ask_cuda_properties()
        self.assertEqual(
            found,
            {
                "capability": (9, 0),
                "capabilities": [(9, 0), (9, 1)],
                "arch": ARCHS[0],
                "archs": [*ARCHS],
                "accepts_cudnn": True,
                "cudnn_version": 0,
                "has_magma": True,
                "has_tf32": True,
                "multicast": True,
            },
        )

    def test_multicast_of_a_torch_without_an_answer(self):
        for answer, expected in (({"return_value": True}, True), ({"side_effect": RuntimeError}, False)):
            with mock.patch.object(build_options, "has_multicast", **answer):
                self.assertIs(device_questions._has_multicast(), expected)

    def test_the_number_of_an_xpu(self):
        with mock.patch.object(torch.xpu, "get_device_capability", lambda: {"device_id": "57867"}):
            self.assertEqual(device_questions.ask_xpu_id(), 57867)


class TestConclusions(unittest.TestCase):
    def test_architectures_of_rocm(self):
        """By the first device."""
        flags = {"TEST_WITH_ROCM": True, "TEST_CUDA": True}
        with (
            has(cuda_properties={"archs": [*ARCHS]}),
            mock.patch.object(torch.version, "hip", "7.2"),
            mock.patch.object(skips_by_architecture, "flag", flags.get),
        ):
            self.assertEqual((skips_by_architecture.getRocmArchName(), skips_by_architecture.getRocmArchName(1)), ARCHS)
            self.assertFalse(skips_by_architecture.is_navi3_arch())
            for arch, skipped, only in (("gfx942", True, False), ("gfx1100", False, True)):
                reasons = [
                    skips_because(decorate([arch])(lambda self: None))
                    for decorate in (skips_by_architecture.skipIfRocmArch, skips_by_architecture.runOnRocmArch)
                ]
                self.assertEqual([bool(reason) for reason in reasons], [skipped, only], (arch, reasons))

    def test_a_jetson_collects_garbage_first(self):
        for is_jetson in (True, False):
            with (
                mock.patch.object(device_cycles, "flag", {"IS_JETSON": is_jetson}.get),
                mock.patch.object(torch.cuda, "empty_cache") as empty_cache,
            ):
                self.assertEqual(device_cycles.gcIfJetson(lambda number: number + 1)(3), 4)
            self.assertEqual(empty_cache.called, is_jetson)

    def test_random_numbers_of_every_device(self):
        self.addCleanup(device_cycles.initialize_cuda_context_rng.cache_clear)
        device_cycles.initialize_cuda_context_rng.cache_clear()
        with (
            mock.patch.object(device_cycles, "flag", lambda name: False),
            self.assertRaisesRegex(AssertionError, "CUDA must"),
        ):
            device_cycles.initialize_cuda_context_rng()
        with (
            mock.patch.object(device_cycles, "flag", lambda name: True),
            mock.patch.object(torch.cuda, "device_count", lambda: 2),
            mock.patch.object(torch, "randn") as randn,
        ):
            device_cycles.initialize_cuda_context_rng()
        self.assertEqual([call.kwargs["device"] for call in randn.call_args_list], ["cuda:0", "cuda:1"])

    def test_triton(self):
        """On a device, a test without Triton skips; on the CPU it is tried."""
        test = failures_by_architecture.xfailIfNoAcceleratorTriton(lambda device: device)
        with mock.patch.object(fsdp_parts, "has_triton", lambda: False):
            self.assertEqual(test(device="cpu"), "cpu")
            with self.assertRaisesRegex(unittest.SkipTest, r"Triton not available \(device='cuda:1'\)"):
                test(device="cuda:1")
        with mock.patch.object(fsdp_parts, "has_triton", lambda: True):
            self.assertEqual(test(device="cuda:1"), "cuda:1")

    def test_the_first_device_of_cuda(self):
        for there, expected in ((True, torch.device("cuda:0")), (False, None)):
            with mock.patch.object(cuda, "flag", {"TEST_CUDA": there}.get):
                self.assertEqual(cuda.first_device(), expected)

    def test_torch_is_answered_only_about_cuda(self):
        """What torch asks for while it is imported."""
        for kind, expected in (("cuda", True), ("xpu", False)):
            with (
                has(accelerator_type=kind, cuda_properties={"capability": (9, 0), "arch": "sm_90"}),
                mock.patch.object(cuda_state, "describing_device") as describing,
                cuda.answering_for_torch(),
            ):
                self.assertEqual(describing.called, expected)


if __name__ == "__main__":
    unittest.main()
