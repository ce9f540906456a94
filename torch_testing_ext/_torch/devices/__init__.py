"""Accelerators in torch: which there are, and whether this process uses them.

Others may take each of the modules. `first_accelerator_use` acts when it is imported.

    accelerator_state      which there are, and whether one is initialised
    build_options          the options with which torch was built
    cuda_state             CUDA's memory, libraries and device numbers
    first_accelerator_use  the line that first used one
"""

# First: torch loads its extensions when it is imported, and ours imports the modules of this folder.
import torch as torch

from torch_testing_ext._torch import imported_garbage

from . import first_accelerator_use as first_accelerator_use

imported_garbage.postpone_collection()
