"""The public names of PyTorch's test kit in several versions of torch: read from sources, or recorded here as data.

The record lets one torch be enough to compare our kit with all of them. It holds names only.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_testing_ext.upstream import defined_names
from torch_testing_ext.upstream.mapping import MIRRORED, THEIR_KIT, UserError, source_of

RECORD = Path(__file__).with_name("kit_names.json")

Kit = Mapping[str, frozenset[str]]  # module of PyTorch's -> its public names
Kits = Mapping[str, Kit]  # version of torch, such as "2.13" -> its kit


def public_names(source: Path) -> set[str]:
    """The names that a test file may import: those in `__all__`, and those that are not imported from elsewhere."""
    own = {
        name for name, kind in defined_names.defined_in(source).items() if kind is not defined_names.NameKind.IMPORTED
    }
    return {name for name in own | _declared_in(source) if not name.startswith("_")}


def _declared_in(file: Path) -> set[str]:
    """The names that a module lists in its `__all__`."""
    assigned = (
        node for node in defined_names.statements(defined_names.parse_source(file).body) if isinstance(node, ast.Assign)
    )
    lists = (node.value for node in assigned if "__all__" in dict(defined_names.bound_by(node)))
    parts = (part for found in lists if isinstance(found, (ast.List, ast.Tuple)) for part in found.elts)
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def read_sources(root: Path) -> Kit:
    """Read the kit below a directory: a checkout, or the place where torch is installed."""
    found = {pair.theirs: source_of(pair.theirs, root) for pair in MIRRORED}
    kit = {module: frozenset(public_names(source)) for module, source in found.items() if source is not None}
    if not kit:
        raise UserError(f"{root} is not a PyTorch checkout: it has no module {THEIR_KIT}")
    return kit


def version_of(root: Path) -> str:
    """The version of torch of the sources: major and minor."""
    checkout, installed = root / "version.txt", root / "torch" / "version.py"
    if checkout.is_file():
        text = checkout.read_text()
    elif installed.is_file():
        text = _value_of("__version__", installed)
    else:
        raise UserError(f"{root} does not say which version of torch it is: it has no version.txt or torch/version.py")
    return ".".join(text.strip().split(".")[:2])


def _value_of(name: str, source: Path) -> str:
    assigned = (
        node
        for node in defined_names.parse_source(source).body
        if isinstance(node, ast.Assign) and name in dict(defined_names.bound_by(node))
    )
    values = [node.value.value for node in assigned if isinstance(node.value, ast.Constant)]
    return str(values[0]) if values else ""


# -- the record


def recorded(file: Path = RECORD) -> Kits:
    """The recorded kits, the oldest version first."""
    data = json.loads(file.read_text(encoding="utf-8"))
    kits: dict[str, dict[str, frozenset[str]]] = {version: {} for version in data["torch"]}
    for module, parts in data["modules"].items():
        for version, kit in kits.items():
            some = {name for name, versions in parts["some"].items() if version in versions}
            if found := {*parts["all"], *some}:
                kit[module] = frozenset(found)
    return kits


def record(kits: Kits, file: Path = RECORD) -> None:
    """Add these kits to the record, or replace those of the same versions."""
    file.write_text(_as_json({**recorded(file), **kits}), encoding="utf-8")


def _as_json(kits: Kits) -> str:
    versions = in_order(kits)
    modules = {
        pair.theirs: _module_as_data(pair.theirs, [kits[version] for version in versions], versions)
        for pair in MIRRORED
    }
    data = {"torch": versions, "modules": {module: data for module, data in modules.items() if data is not None}}
    return json.dumps(data, indent=1) + "\n"


def _module_as_data(module: str, kits: list[Kit], versions: list[str]) -> dict[str, Any] | None:
    found = [kit.get(module, frozenset()) for kit in kits]
    every = frozenset.intersection(*found)
    some = sorted(frozenset.union(*found) - every)
    if not every and not some:
        return None
    where = {name: [version for version, has in zip(versions, found, strict=True) if name in has] for name in some}
    return {"all": sorted(every), "some": where}


def in_order(kits: Kits) -> list[str]:
    """The versions, the oldest first."""
    return sorted(kits, key=lambda version: tuple(int(part) for part in version.split(".")))
