"""Knowledge of torch's inside: its private names, its frames and the functions of it that are replaced.

It imports nothing of this package; every room may import it. Where a private name is used, the docstring of the
function gives the versions of torch in which it is known to work.

    replacing         the functions of torch that are replaced while something watches them
    signs/            names of threads, texts of errors and keys of records, for processes without torch
    groups/           process groups: which have been made, what they record, how they fail, those of threads
    operations/       the operations of c10d, their works and their tensors, and hooks on them
    devices/          accelerators, options of the build, CUDA's state, the first use of a device
    tensors/          comparison, subclasses, reads and values of tensors; DTensors; tensors that ranks hold alike
    torch_frames      frames of torch on the stack
    compiler_state    torch.compile
    function_modes    modes that see functions of torch
    module_parts      parameters of a module
    ddp_parts         DistributedDataParallel
    fsdp_parts        FSDP, and state dicts of sharded models
    training          what the data-parallel compiler knows of autograd, optimizers and DTensor
    imported_garbage  the collector, which an import of torch leaves much to do
"""

from . import imported_garbage

# Here, and where this package imports torch: whoever comes first.
imported_garbage.postpone_collection()
