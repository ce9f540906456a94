"""The names of torch.distributed's backends, as tests write them: "nccl2", "cpu:gloo,cuda:nccl"."""

from __future__ import annotations

# torch 2.15 has them all: "nccl" is then what "nccl2" is, and "nccl-legacy" what "nccl" was before.
NCCL = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy")


def names_in(backend: str) -> list[str]:
    """Split "cpu:gloo,cuda:nccl", for example, into gloo and nccl."""
    names = []
    for part in backend.split(","):
        _, _, name = part.rpartition(":")
        names.append(name.strip().lower())
    return names


def uses_nccl(backend: str | None) -> bool:
    """Whether this is NCCL, under any of its names, for any type of device."""
    names = names_in(backend or "")
    return any(name in NCCL for name in names)
