"""Facts that must be the same on all machines of a run, found out without importing torch."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch_testing_ext

from .agent_messages import NodeFacts
from .ray_actor import digest_of

MISSING = "not installed"
_NAMES = {
    "package": "torch_testing_ext",
    "torch": "torch",
    "cuda": "CUDA or ROCm of torch",
    "python": "Python",
    "platform": "platform",
}


@functools.cache
def facts() -> NodeFacts:
    """Return the NodeFacts of this machine."""
    torch = _torch_version()
    return NodeFacts(
        _package(),
        torch.get("__version__", MISSING),
        torch.get("cuda", "") or torch.get("hip", ""),
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
    )


def _package() -> str:
    try:
        version = importlib.metadata.version("torch-testing-ext")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed as a package"
    # A version under development has one number for many states.
    return f"{version}, sources {digest_of(str(Path(torch_testing_ext.__file__).parent))[:12]}"


def _torch_version() -> dict[str, str]:
    """The texts that torch/version.py assigns: importing torch takes seconds."""
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            text = Path(place, "version.py").read_text(encoding="utf-8")
            found = re.findall(r"^(\w+)\s*(?::[^=\n]*)?=\s*(['\"])(.*?)\2\s*$", text, re.MULTILINE)
            return {name: value for name, _, value in found}
    return {}


def differences(here: NodeFacts, nodes: Mapping[str, NodeFacts]) -> list[str]:
    """Return the differences: node, fact, and its values here and there."""
    return [
        f"  {node}: {_NAMES[field.name]} is {getattr(there, field.name) or 'none'}, "
        f"here {getattr(here, field.name) or 'none'}"
        for node, there in nodes.items()
        for field in fields(NodeFacts)
        if getattr(there, field.name) != getattr(here, field.name)
    ]
