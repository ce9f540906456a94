"""Computes on which devices the suites run, with 0 to 8 accelerators, and writes it into docs/contribute/suites.md.

    python docs/tools/suites_by_devices.py [--write]

The accelerators are of Python (`test/torch_testing_ext/kit/python_accelerator`): torch counts them, and nothing runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contribute" / "suites.md"
ACCELERATORS = ROOT / "test" / "torch_testing_ext" / "kit" / "python_accelerator"
MACHINES = (0, 1, 2, 3, 4, 8)
BEGIN, END = "<!-- suites by devices -->", "<!-- end -->"
KIND, BACKEND = "testacc", "testccl"
# In the table: the backend of the accelerators, whichever they are.
OWN = "own"


@dataclass(frozen=True)
class Place:
    """Where a test runs on one machine. `devices`: those of its lease; `kind`: what its class says that it uses."""

    ranks: int = 0
    devices: int = 0
    kind: str = ""
    skips: bool = False
    backend: str = "gloo"

    def __str__(self) -> str:
        if self.skips:
            return "skips"
        return f"{self.ranks} on {self.devices}" if self.devices else f"{self.ranks} on CPU"


Places = tuple[Place, ...]


def suites() -> list[Path]:
    return sorted((ROOT / "test" / "distributed").rglob("test_*.py"))


def places_of(files: Sequence[Path], machines: Sequence[int] = MACHINES) -> dict[str, dict[str, Places]]:
    """Compute, by file and name, where each test runs on each machine. Gives this process accelerators for good."""
    # torch first: from this folder it would take the accelerators for an installed extension, in the middle of theirs.
    importlib.import_module("torch")
    sys.path.insert(0, str(ACCELERATORS))
    importlib.import_module("python_accelerator").register()
    from torch_testing_ext.runner.load_as import LoadAs
    from torch_testing_ext.runner.processes.loaded_file import LoadedFile

    search_path = list(sys.path)
    places = {}
    for path in files:
        with _accelerators(0):
            file = LoadedFile.load(str(path), LoadAs(by_pytest=False))
        on_machines = [_on_machine(file, path.name, count) for count in machines]
        places[str(path.relative_to(ROOT / "test" / "distributed"))] = {
            name: tuple(machine[name] for machine in on_machines) for name in on_machines[0]
        }
        sys.path[:] = search_path
    return places


def _on_machine(file: Any, path: str, count: int) -> dict[str, Place]:
    """Where each test of a file runs on a machine with so many accelerators."""
    from torch_testing_ext.runner.options import Options
    from torch_testing_ext.runner.scheduling.inventory import make_inventory
    from torch_testing_ext.runner.scheduling.plan import plan

    with _accelerators(count):
        inventory = make_inventory(Options(), {}, KIND if count else None, count)
        tests = file.listing(path, count)
        kinds = {named.name: _device_type(named.test) for named in file.named}
        backends = {
            named.name: _backend(named.test, test.backend, kinds[named.name] or (KIND if test.devices else "cpu"))
            for named, test in zip(file.named, tests, strict=True)
        }
    planned = plan(tests, inventory, lambda test: None)
    # A skip that no device changes, as that of a compiler which is missing here, does not count.
    always = {test.id for test in tests if test.skip is not None}
    skipped = {test.id for test in planned.skipped} - always
    places = {}
    for named, test in zip(file.named, tests, strict=True):
        name = named.name
        places[name] = Place(test.world_size, test.devices, kinds[name], test.id in skipped, backends[name])
    return places


def _device_type(test: Any) -> str:
    """The type of device that a test says it uses; classes that keep their ranks have a method for it."""
    said = getattr(test, "device_type", "")
    return str((said() if callable(said) else said) or "")


def _backend(test: Any, needed: str | None, kind: str) -> str:
    """The backend that a test needs or its class names, or else torch's default for the device of its tensors."""
    from torch.distributed import get_default_backend_for_device

    from torch_testing_ext.distributed._tensor.common_dtensor import LocalDTensorTestBase

    if isinstance(test, LocalDTensorTestBase):
        return "fake"
    own = getattr(test, "backend", None)
    return needed or (own if isinstance(own, str) else get_default_backend_for_device(kind))


class _accelerators:
    """A context in which torch has so many accelerators."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        from torch_testing_ext._machine import accelerators

        os.environ["TESTACC_COUNT"] = str(self._count)
        accelerators._answer.cache_clear()

    def __exit__(self, *_: object) -> None:
        pass


def table(places: Mapping[str, Mapping[str, Places]]) -> str:
    """The table of docs/contribute/suites.md: tests of a file that run on the same devices are one row.

    The files whose tests never use devices are the last row together.
    """
    machines = " | ".join(str(count) for count in MACHINES)
    lines = [f"| suite | tests | backend | {machines} |", "| --- " * (len(MACHINES) + 3) + "|"]
    others: list[Places] = []
    files = 0
    for file, tests in places.items():
        if all(place.devices == 0 for on_machines in tests.values() for place in on_machines):
            others += tests.values()
            files += 1
            continue
        rows = Counter((backends_in_words([row]), *map(str, row)) for row in tests.values())
        for row, number in rows.items():
            lines.append(f"| `{Path(file).stem}` | {number} | {' | '.join(row)} |")
    cells = " | ".join(["on CPU"] * len(MACHINES))
    rest = f"the {files} other suites, of properties and faults"
    return "\n".join([*lines, f"| {rest} | {len(others)} | {backends_in_words(others)} | {cells} |"])


def backends_in_words(rows: Sequence[Places]) -> str:
    """The backends of tests, on any machine where they run. The accelerators' own has another name for each type."""
    names = dict.fromkeys(place.backend for row in rows for place in row if not place.skips)
    return ", ".join(OWN if name == BACKEND else name for name in names)


def problems(places: Mapping[str, Mapping[str, Places]]) -> Iterator[str]:
    """What must not be: a test that only a machine without devices runs, or one that holds devices on the CPU."""
    for file, tests in places.items():
        for name, on_machines in tests.items():
            for count, place in zip(MACHINES, on_machines, strict=True):
                if place.skips:
                    if not on_machines[0].skips:
                        yield f"{file} {name} runs without devices, and skips with {count}"
                elif place.devices and place.kind == "cpu":
                    yield f"{file} {name} runs on the CPU, and holds {place.devices} of {count} devices"
                elif place.kind == KIND and not place.devices:
                    yield f"{file} {name} uses devices that it does not lease, of {count}"
                elif place.backend not in ("fake", BACKEND if place.devices else "gloo"):
                    where = f"with {place.devices} of {count} devices"
                    yield f"{file} {name} communicates over {place.backend}, {where}"


def with_table(page: str, text: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/contribute/suites.md")
    options = parser.parse_args()
    places = places_of(suites())
    text = table(places)
    print(text, *problems(places), sep="\n")
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
