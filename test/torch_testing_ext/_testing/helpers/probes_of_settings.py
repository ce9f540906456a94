"""Probes of what changes torch's settings: each returns them, and what it leaves behind."""

import os

import torch
from probes import attempt, probe


@probe
def deterministic_flags(kit):
    seen = []

    @kit.wrapDeterministicFlagAPITest
    def test():
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        torch.use_deterministic_algorithms(True)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = "changed"

    test()
    return [seen, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()]


@probe
def default_dtype(kit):
    seen = []

    class Case:
        device = "cpu"

        def get_primary_device(self):
            return self.device

        @kit.set_default_dtype_if_supported(torch.double)
        def test_it(self, result):
            seen.append(str(torch.get_default_dtype()))
            return result

    return [Case().test_it(3), seen, str(torch.get_default_dtype())]


def precisions():
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    settings = (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    return [*(setting.fp32_precision for setting in settings), attempt(torch.get_float32_matmul_precision)]


@probe
def precision_of_float32(kit):
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # the initial value differs between versions of PyTorch's kit
    seen = [precisions()]

    @kit.recover_orig_fp32_precision
    def changes():
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        seen.append(precisions())

    changes()
    seen.append(precisions())
    for context in (kit.tf32_off, kit.tf32_enabled):
        with context():
            seen.append([torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32])
        seen.append(precisions())
    test = kit.TestCase()
    before = test.precision
    with kit.tf32_on(test, 0.25):
        seen.append([torch.backends.cuda.matmul.allow_tf32, test.precision])
    seen.append([precisions(), test.precision == before])
    return seen


@probe
def ieee(kit):
    @kit.with_ieee_matmul_precision
    def test(value):
        return [value, precisions()[0], precisions()[3]]

    torch.backends.cuda.matmul.fp32_precision = "tf32"
    found = [test(3), precisions()]
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return found


@probe
def tf32_with_parameters(kit):
    calls = []

    class Case:
        precision = 0

        @kit.tf32_on_and_off(0.5)
        def test_it(self, device, dtype):
            calls.append([device, str(dtype), self.precision])

    Case().test_it("cpu", torch.float32)
    Case().test_it(device="cuda", dtype=torch.int8)
    return calls


@probe
def preferred_library(kit):
    before = torch.backends.cuda.preferred_blas_library()
    with kit.blas_library_context("default"):
        inside = torch.backends.cuda.preferred_blas_library()
    return [repr(before), repr(inside), repr(torch.backends.cuda.preferred_blas_library())]
