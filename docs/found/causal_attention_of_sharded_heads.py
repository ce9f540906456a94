"""DTensor: causal attention of sharded tensors fails with the math kernel, which adds a plain mask to them.

scaled_dot_product_attention takes this kernel where no fused one fits: always on devices without such kernels, and on
some others for float32. It is one C++ function of several operators, and DTensor sees each of these. Where is_causal is
true, the function makes the mask by at::ones, which is a plain tensor, and the addition refuses it beside a DTensor.
With the same mask as a DTensor in attn_mask, the result is right.

Seen on torch 2.12 to 2.15; 2.11 fails earlier, at a view. Near: pytorch/pytorch#147793, which has it for
context_parallel, and pytorch/pytorch#177583. Found when
test/distributed/tensor/parallel/test_tp_examples.py ran on fake accelerators.

Run this file: it prints what torch does and what is right, and exits with 1 if they differ.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def attend() -> tuple[str, float]:
    """Return the result, or the error, for DTensors sharded by heads, and the result for plain tensors."""
    mesh = init_device_mesh("cpu", (1,))
    plain = [torch.rand(2, 2, 4, 8) for _ in range(3)]
    sharded = [distribute_tensor(each, mesh, [Shard(1)]) for each in plain]
    with sdpa_kernel(SDPBackend.MATH):
        right = scaled_dot_product_attention(*plain, is_causal=True).sum().item()
        try:
            got = scaled_dot_product_attention(*sharded, is_causal=True)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            return f"{type(error).__name__}: {error}", right
    assert isinstance(got, DTensor)
    return str(got.full_tensor().sum().item()), right


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    got, right = attend()
    print(f"torch returns {got}, and {right} is right")
    sys.exit(got != str(right))
