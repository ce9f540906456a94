"""The options with which torch was built, and whether it may find a device."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from torch_testing_ext._torch.devices import build_options

NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("node", "cuda", "environ", "expected"),
    [
        ("nvidia0", "12.8", {}, True),
        ("nvidiactl", "12.8", {}, True),
        ("dxg", "12.8", {"CUDA_VISIBLE_DEVICES": "0"}, True),
        ("kfd", "12.8", {}, True),
        ("nvidia-caps", "12.8", {}, False),
        ("nvidia0", "12.8", NO_DEVICE, False),
        ("nvidia0", "12.8", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        ("nvidia0", None, {}, False),
        ("null", "12.8", {}, False),
    ],
)
def test_devices(tmp_path, node, cuda, environ, expected):
    (tmp_path / node).touch()
    version = mock.patch.multiple(torch.version, cuda=cuda, hip=None)
    with version, mock.patch.object(build_options, "other_accelerator_is_built", lambda: False):
        assert build_options.device_may_exist(tmp_path, environ) is expected


def test_other_accelerators(tmp_path):
    with mock.patch.object(build_options, "other_accelerator_is_built", lambda: True):
        assert build_options.device_may_exist(tmp_path, NO_DEVICE)


def test_other_builds():
    parts = {"_C._mtia_isBuilt": torch._C, "xpu._is_compiled": torch.xpu, "backends.mps.is_built": torch.backends.mps}
    for name, owner in parts.items():
        others = [mock.patch.object(one, key.rpartition(".")[2], lambda: False) for key, one in parts.items()]
        with others[0], others[1], others[2]:
            assert not build_options.other_accelerator_is_built()
            with mock.patch.object(owner, name.rpartition(".")[2], lambda: True):
                assert build_options.other_accelerator_is_built()
            with mock.patch.object(torch, "hpu", SimpleNamespace(), create=True):
                assert build_options.other_accelerator_is_built()


def test_internal_build():
    assert not build_options.is_internal_build()
    with mock.patch.object(torch._utils_internal, "IS_FBSOURCE", True, create=True):
        assert build_options.is_internal_build()


def test_cpu():
    assert build_options.cpu_kernels() == torch.backends.cpu.get_cpu_capability()
    assert isinstance(build_options.cpu_capabilities(), dict)
    with mock.patch.object(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True}):
        assert build_options.cpu_capabilities() == {"avx512_vnni": True}


def test_libraries():
    lapack = torch._C.has_lapack
    assert build_options.has_lapack() is lapack
    with mock.patch.object(torch._C, "has_lapack", not lapack):
        assert build_options.has_lapack() is not lapack
    assert build_options.onednn_uses_arm_compute_library() == torch.ops.mkldnn._is_mkldnn_acl_supported()


def test_multicast():
    asked = []
    symmetric = mock.patch.object(
        torch._C._distributed_c10d,
        "_SymmetricMemory",
        SimpleNamespace(has_multicast_support=lambda *words: asked.append(words) or True),
    )
    with symmetric:
        assert build_options.has_multicast()
    ((kind, index),) = asked
    assert (kind.name, index) == ("CUDA", 0)
