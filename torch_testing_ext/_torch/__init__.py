"""The only package that uses private names of torch, with a module for each subject.

Every function hides one private name, and its docstring gives the versions of torch in which it is known to work.
At module level, it imports nothing beyond `import torch, torch.distributed`.
"""

from . import (
    built_with as built_with,
    comparing as comparing,
    cuda_state as cuda_state,
    dtensor as dtensor,
    first_use as first_use,
    flight_recorder as flight_recorder,
    fsdp as fsdp,
    launch as launch,
    process_state as process_state,
    spmd as spmd,
    subclasses as subclasses,
    threads as threads,
)

process_state.postpone_collection()
