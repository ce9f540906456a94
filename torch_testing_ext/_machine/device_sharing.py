"""Rules by which ranks share accelerators, where a test has more ranks than there are devices.

Nothing is shared unless the user asks: by torchtest --ranks-per-gpu, or by TORCH_TESTING_EXT_RANKS_PER_GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch_testing_ext._process.words import size_in_words

RANKS_PER_GPU = "TORCH_TESTING_EXT_RANKS_PER_GPU"

# From this version on, NCCL lets several ranks of a communicator use one device, if it is told to.
NCCL_SHARES_SINCE = (2, 30)
# A context of CUDA, the kernels of torch and the buffers of NCCL, which torch's allocator knows nothing of.
CONTEXT = 600 * 2**20
# A rank with less memory than this for its tensors is of no use.
LEAST = 256 * 2**20
# The thread blocks that the collectives of all ranks of a device may occupy together: NCCL hangs if they do not fit.
BLOCKS = 32


def ranks_per_device(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks may share an accelerator; 1 unless the user has asked for more."""
    text = environ.get(RANKS_PER_GPU) or "1"
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ValueError(f"{RANKS_PER_GPU}={text!r} is not valid; use a number of ranks: 1, 2, 3 ...")
    return number


def device_of(rank: int, devices: int) -> int:
    """Return the number of the device that a rank uses: its own, or the one that it shares."""
    return rank % devices


def ranks_on_device(rank: int, world_size: int, devices: int) -> int:
    """Return how many of the ranks use the device of this rank."""
    first = device_of(rank, devices)
    return len(range(first, world_size, devices))


def fraction_for(total: int, ranks: int) -> float:
    """Return the part of a device's memory that torch's allocator may take in one of the ranks on it."""
    usable = total // ranks - CONTEXT
    return max(usable, LEAST) / total


def why_too_many(ranks: int, total: int, device: str) -> str | None:
    """Say why a device with `total` bytes is too small for so many ranks; None if it is not."""
    share = total // ranks
    needed = CONTEXT + LEAST
    if share >= needed:
        return None
    most = max(1, total // needed)
    share_in_words, whole, least = map(size_in_words, (share, total, needed))
    return (
        f"{ranks} ranks on one GPU would have {share_in_words} each of the {whole} of device {device}, and a "
        f"rank needs {least} before it has a tensor: at most {most}"
    )


# NCCL's own variable. A user for whom its experiment hangs sets it to 0, so that the ranks use gloo.
NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"


def shared_backend(nccl: tuple[int, ...], hip: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Return the backend of ranks that share a device. `nccl`: NCCL's version, () without NCCL."""
    can_share = not hip and nccl[:2] >= NCCL_SHARES_SINCE and environ.get(NCCL_SHARES) != "0"
    return "nccl" if can_share else "gloo"


def blocks_for(ranks: int) -> int:
    """Return how many thread blocks a collective of NCCL may have in each of the ranks on a device."""
    return max(1, BLOCKS // ranks)


_UNITS = {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def read_bytes(text: str) -> int:
    """Convert an amount of memory such as "20 GB", "512MiB" or "1.5 GiB" to bytes."""
    number = text.strip().lower()
    unit = next((name for name in _UNITS if number.endswith(name)), "")
    try:
        amount = float(number.removesuffix(unit)) if unit else 0.0
    except ValueError:
        amount = 0.0
    if not 0 < amount < 2**20:
        raise ValueError(f"{text!r} is not an amount of memory: write a number and a unit, such as 20 GB or 512 MiB")
    return int(amount * _UNITS[unit])
