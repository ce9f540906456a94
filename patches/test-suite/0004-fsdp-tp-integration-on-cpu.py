"""[FSDP][TP][test] Run test_fsdp_tp_integration on CPU

Problem: without four accelerators, no test of FSDP + TP runs.

Cause: the tests move tensors to the device with the number of the rank, and FSDP
looks for an accelerator, unless it is told the device. And a build with CUDA
has the current accelerator "cuda" without a driver, too.

Fix: on CPU, use four ranks and gloo, and pass the device to FSDP. Offloading to
the CPU pins memory, and sync_module_states refuses modules on the CPU: what
tests them still needs accelerators. Gloo gathers lists of tensors, so FSDP's
collectives have another name there. And test_fsdp_tp_extension_grad passed if no
parameter had a gradient: expect one.

This depends on the change that lets FSDPTest and FSDPTestContinuous run on CPU
(torch/testing/_internal/common_fsdp.py).

Test plan: CUDA_VISIBLE_DEVICES= python test/distributed/fsdp/test_fsdp_tp_integration.py
"""

FILE = "test/distributed/fsdp/test_fsdp_tp_integration.py"
CLASS = "TestTPFSDPIntegration"
ON_CPU = ("test_fsdp_tp_integration", "test_fsdp_tp_extension_grad")

DEVICE = """\
    if device_type == "cpu":
        world_size = 4

    @property
    def rank_device(self) -> torch.device:
        return torch.device(device_type, None if device_type == "cpu" else self.rank)

"""
# FSDP pins the memory of offloaded parameters, which takes an accelerator.
OFFLOAD = r"^( +)(CPUOffload\(offload_params=True\)),$"
GATHERS = """\
        # FSDP gathers lists of tensors if the backend is gloo
        gather = c10d_ops.allgather_ if device_type == "cpu" else c10d_ops._allgather_base_
"""


def edit(source):
    source.sub("", r"(current_accelerator\()\)", r"\1check_available=True)")
    source.sub(CLASS, r"\A(class .*\n)", rf"\1{DEVICE}")
    for test in ON_CPU:
        source.sub(f"{CLASS}.{test}", r"@skip_if_lt_x_gpu\(4\)", "@skip_if_lt_x_gpu(4, allow_cpu=True)")
    source.sub(
        f"{CLASS}.test_fsdp_tp_integration",
        OFFLOAD,
        r'\1# Offloading pins memory\n\1*([\2] if device_type != "cpu" else []),',
    )
    source.sub(CLASS, r"\.to\(self\.rank\)", ".to(self.rank_device)", times=7)
    source.sub(
        f"{CLASS}._test_fsdp_tp_integration", r"^( +)cpu_offload=.*\n", r"\g<0>\1device_id=self.rank_device,\n", times=2
    )
    grad = f"{CLASS}.test_fsdp_tp_extension_grad"
    source.sub(grad, r"( FSDP\(.*)\)$", r"\1, device_id=self.rank_device)")
    source.sub(grad, r"^(?= +# FSDP comms)", GATHERS)
    source.sub(grad, r"^( +)(grads) = .*\n", r"\g<0>\1self.assertTrue(\2)\n")
    source.sub(grad, r"\[c10d_ops\._allgather_base_\]", "[gather]")
