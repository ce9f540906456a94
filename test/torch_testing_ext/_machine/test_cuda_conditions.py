"""The conditions of common_cuda are PyTorch's, on each kind of device: torch is told which one it has."""

from __future__ import annotations

import importlib
import os
import types
from typing import Any
from unittest import mock

import torch
from kit.ranks import OneRank

from torch_testing_ext._machine import accelerators, cuda, cuda_support, flags
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests

OVERRIDE = "PYTORCH_DEBUG_FLASH_ATTENTION_GCN_ARCH_OVERRIDE"
EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
CAPABILITIES = [*((7, n) for n in (0, 2, 5)), *((8, n) for n in (0, 7, 9)), (9, 0), (10, 0), (10, 1), (11, 0), (12, 0)]
# Ours are the answers of torch 2.15 on every version.
KNOWN_SINCE_2_15 = ("gfx950", "gfx1250")
JUDGED_ANEW_IN_2_15 = [("gfx1201", "6.3.1")]
ARCHS = ["gfx906", "gfx90a:sramecc+:xnack-", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1201", "gfx1250"]


@instantiate_parametrized_tests
class CudaConditionsTest(OneRank):
    """In a rank: importing PyTorch's modules changes a process."""

    @parametrize("version", ["12.8", "13.0"])
    def test_cuda(self, version: str) -> None:
        for capability in CAPABILITIES:
            with self.subTest(capability=capability):
                self.compare(capability, cuda_version=version)

    @parametrize("version", ["6.3.1", "6.5.0", "7.2.0", "7.14.0"])
    def test_rocm(self, version: str) -> None:
        for arch in ARCHS:
            if torch.__version__ < (2, 15) and (arch in KNOWN_SINCE_2_15 or (arch, version) in JUDGED_ANEW_IN_2_15):
                continue
            for environ in ({}, {OVERRIDE: "gfx942"}, {EXPERIMENTAL: "1"}):
                with self.subTest(arch=arch, **environ), mock.patch.dict(os.environ, environ):
                    self.compare((9, 4), rocm_version=version, arch=arch)

    def compare(
        self,
        capability: tuple[int, int],
        cuda_version: str | None = None,
        rocm_version: str | None = None,
        arch: str = "",
    ) -> None:
        version: dict[str, Any] = {"cuda": cuda_version, "hip": rocm_version, "rocm": rocm_version}
        test_flags = {"TEST_CUDA": True, "TEST_WITH_ROCM": rocm_version is not None}
        device: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda *_: capability,
            "get_device_properties": lambda *_: types.SimpleNamespace(gcnArchName=arch),
        }
        cudnn: dict[str, Any] = {"version": lambda: 91002, "is_acceptable": lambda _: True}
        properties = {"capability": capability, "arch": arch, "accepts_cudnn": True, "cudnn_version": 91002}
        common_utils: Any = importlib.import_module("torch.testing._internal.common_utils")
        common_cuda: Any = importlib.import_module("torch.testing._internal.common_cuda")
        with (
            mock.patch.multiple(torch.version, create=True, **version),
            mock.patch.multiple(torch.cuda, **device),
            mock.patch.multiple(torch.backends.cudnn, **cudnn),
            mock.patch.object(torch, "tensor", lambda *_, **__: None),
            mock.patch.multiple(common_utils, **test_flags),
            mock.patch.object(accelerators, "cuda_properties", lambda: properties),
            mock.patch.object(flags, "flag", test_flags.get),
        ):
            theirs = conditions(importlib.reload(common_cuda))
            ours = conditions(importlib.reload(cuda)) | conditions(importlib.reload(cuda_support))
            names = sorted(theirs.keys() & ours.keys())
            self.assertGreater(len(names), 35)
            self.assertEqual(
                {name: bool(theirs[name]()) for name in names}, {name: bool(ours[name]()) for name in names}
            )


def conditions(module: Any) -> dict[str, Any]:
    """Everything in the module that answers yes or no, as functions."""
    found = {}
    for name, value in vars(module).items():
        if type(value).__name__ == "LazyVal" and name != "ROCM_VERSION":
            found[name] = lambda value=value: bool(value)
        elif name.startswith(("evaluate_platform", "CDNA")):
            found[name] = value
    return found


if __name__ == "__main__":
    run_tests()
