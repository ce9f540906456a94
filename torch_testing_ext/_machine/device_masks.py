"""The variables that mask accelerators: a process sees the devices that they name."""

import os
from collections.abc import Mapping

# The variables that mask each kind of accelerator, the one that takes precedence first.
MASKS = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    # These number the devices that ROCR_VISIBLE_DEVICES leaves.
    "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
    "hpu": ("HABANA_VISIBLE_MODULES",),
    "mlu": ("MLU_VISIBLE_DEVICES",),
    "musa": ("MUSA_VISIBLE_DEVICES",),
    "neuron": ("NEURON_RT_VISIBLE_CORES",),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}


def masks_of(kind: str) -> tuple[str, ...]:
    """The variables that mask accelerators of this kind, the one that takes precedence first.

    An accelerator that is not in the table is supposed to use the name that most have.
    """
    return MASKS.get(kind, (f"{kind.upper()}_VISIBLE_DEVICES",))


def all_masks(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Every variable that may mask an accelerator in a process with this environment."""
    known = {name for names in MASKS.values() for name in names}
    supposed = {name for name in environ if name.endswith("_VISIBLE_DEVICES")}
    # What a container gets, which is of no account in it.
    return frozenset((known | supposed) - {"NVIDIA_VISIBLE_DEVICES"})
