"""Knowledge of torch's inside: its private names, its frames and the functions of it that are replaced.

It imports nothing of this package; every room may import it. Where a private name is used, the docstring of the
function gives the versions of torch in which it is known to work.

    groups/           process groups: which have been made, what they record, how they fail, those of threads
    operations/       the operations of c10d, their works and their tensors, and hooks on them
    devices/          accelerators, options of the build, CUDA's state, the first use of a device
    tensors/          comparison, subclasses, reads and values of tensors; DTensors; tensors that ranks hold alike
    torch_frames      frames of torch on the stack
    compiler_state    torch.compile
    function_modes    modes that see functions of torch
    fsdp_parts        FSDP, and state dicts of sharded models
    training          what the data-parallel compiler knows of autograd, optimizers and DTensor
    imported_garbage  the collector, which an import of torch leaves much to do
"""

# First: torch loads its extensions when it is imported, and ours imports the modules below.
import torch as torch

from . import (
    compiler_state as compiler_state,
    fsdp_parts as fsdp_parts,
    function_modes as function_modes,
    imported_garbage,
    torch_frames as torch_frames,
    training as training,
)
from .devices import first_accelerator_use as first_accelerator_use
from .groups import thread_worlds as thread_worlds, watched_groups as watched_groups
from .tensors import (
    dtensor_parts as dtensor_parts,
    replicated_tensors as replicated_tensors,
    tensor_comparison as tensor_comparison,
    tensor_reads as tensor_reads,
    tensor_subclasses as tensor_subclasses,
)

imported_garbage.postpone_collection()
