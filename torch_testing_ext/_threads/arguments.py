"""The arguments of a collective in threads: `(outputs, inputs)`, or the tensors of one that works in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_of(arguments: Any) -> Iterator[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for part in arguments:
            yield from tensors_of(part)


def agreement(kind: str, arguments: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Further properties that must agree in a sanitized collective: reduce operation, root, sizes for each peer."""
    op, root = options.get("op"), options.get("root")
    name = None if op is None else str(getattr(op, "op", op)).rpartition(".")[2].lower()
    details = [*([name] if name else []), *([f"root {root}"] if root is not None else [])]
    extra: dict[str, Any] = {"options": [name, root], "details": details}
    if kind == "all_to_all":
        outputs, inputs = arguments
        extra["exchange"] = [[tensor.numel() for tensor in side] for side in (inputs, outputs)]
    return extra


def written_and_read(
    rank: int, kind: str, arguments: Any, options: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a collective writes in this rank of the group, and those that it only reads."""
    if isinstance(arguments, tuple) and arguments:
        outputs, inputs = (list(tensors_of(part)) for part in arguments)
        return outputs, inputs
    tensors = list(tensors_of(arguments))
    return ([], tensors) if kind == "broadcast" and options.get("root") == rank else (tensors, [])


def finish_on_device(arguments: Any) -> None:
    """Streams belong to threads: work that one has queued on a tensor must end before another touches the tensor."""
    for device in {tensor.device for tensor in tensors_of(arguments)}:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()
