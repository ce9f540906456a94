"""The only package that uses private names of torch, with a module for each subject.

It imports nothing of this package; every room may import it. Every function hides one private name, and its docstring
gives the versions of torch in which it is known to work. At module level, it imports nothing beyond
`import torch, torch.distributed`.
"""

# First: torch loads its extensions when it is imported, and ours imports the modules below.
import torch as torch

from . import (
    device_state as device_state,
    flight_recorder as flight_recorder,
    process_state as process_state,
    sharding as sharding,
    tensors as tensors,
    tracing as tracing,
)

process_state.postpone_collection()
