#!/usr/bin/env python3
"""Choose the calls that test_dtensor_opinfo_properties.py replays, and write them as a module of data.

    python docs/tools/choose_opinfo_examples.py

The calls are samples of torch's OpInfo database whose operation has a public name, with whole numbers in the tensors
and with literal arguments. Four ranks try them; of those that all answer, as one device does, a few for each kind of
operation and layout are chosen. To drop those that another torch refuses: `--only-answered`, with its Python.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from choose_examples import Example, choose
from example_source import source_of
from example_traits import of_layout
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from torch_testing_ext.hypothesis_utils import MeshPlan, given, reject, replay, whole_numbers

FOLDER = Path(__file__).resolve().parents[2] / "test" / "distributed" / "properties"
DATA = FOLDER / "dtensor_opinfo_examples.py"
sys.path.insert(0, str(FOLDER))
MESHES = ((4,), (2, 2), (4,), (1, 4), (2, 2), (4, 1))  # those with ranks in one dim, or in two, more often
TRIES = 3  # of each operation
SMALL = 400  # elements of a tensor
MOST = 150
HEADER = '''\
"""The calls of test_dtensor_opinfo_properties.py, by value; choose_opinfo_examples.py chose them."""

import torch
from dtensor_opinfo_support import Call
from torch.distributed.tensor import Partial, Replicate, Shard

from torch_testing_ext.hypothesis_utils import MeshPlan, whole_numbers


def on(mesh, title, placements, *args, **kwargs):
    return {"case": (MeshPlan(mesh), Call(title, placements, args, kwargs))}


'''
LITERALS = (bool, int, float, str, type(None), torch.dtype, torch.memory_format)


# -- candidates


def candidates() -> Iterator[Example]:
    """Make calls out of samples of the database."""
    from dtensor_opinfo_database import OPERATIONS, samples_of, tensors_in
    from dtensor_opinfo_support import Call, is_known_to_fail

    for title in sorted(OPERATIONS):
        name = public_name(OPERATIONS[title])
        samples = [filled(sample) for sample in samples_of(title) if name and is_literal(sample)]
        chosen = random.Random(title)
        for number in range(TRIES if samples else 0):
            args, kwargs = samples[number % len(samples)]
            mesh = MeshPlan(MESHES[int(chosen.random() * len(MESHES))])
            placements = tuple(placed(chosen, mesh, one) for one in tensors_in((args, kwargs)))
            call = Call(name, placements, args, kwargs)
            if any(not one.is_replicate() for each in placements for one in each) and not is_known_to_fail(mesh, call):
                yield {"case": (mesh, call)}


def public_name(info: Any) -> str | None:
    """Return the name below `torch` of an operation, if it has one that is neither private nor the database's own."""
    for name in (info.name, f"Tensor.{info.name}"):
        if not any(part.startswith("_") for part in name.split(".")):
            try:
                functools.reduce(getattr, name.split("."), torch)
            except AttributeError:
                continue
            return name
    return None


def is_literal(sample: Any) -> bool:
    leaves = pytree.tree_leaves(sample)
    return all(isinstance(one, LITERALS) or (isinstance(one, torch.Tensor) and one.numel() <= SMALL) for one in leaves)


def filled(sample: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda one: whole_numbers(tuple(one.shape), one.dtype), sample)


def placed(chosen: random.Random, mesh: MeshPlan, tensor: torch.Tensor) -> tuple[Any, ...]:
    kinds = [Replicate(), *map(Shard, range(tensor.dim())), *map(Shard, range(tensor.dim()))]
    kinds += [Partial()] if tensor.dtype.is_floating_point else []
    return tuple(kinds[int(chosen.random() * len(kinds))] for _ in mesh.shape)


# -- trying them


def answered(examples: list[Example], folder: Path) -> list[Example]:
    """Return the calls that all ranks answer, as one device does."""
    import test_dtensor_opinfo_properties as suite

    numbers = {repr(example["case"][1]) + str(example["case"][0]): number for number, example in enumerate(examples)}

    class Probe(suite.TestOpInfo):  # type: ignore[misc]
        """Notes in a file which calls a rank answers."""

        @suite.PROFILE
        @replay([("", example) for example in examples])
        @given(case=st.none())
        def probe(self, case: Any) -> None:
            mesh, call = case
            try:
                self.check_results(mesh, call)
            except Exception as error:
                if self.rank == 0:
                    print(f"{mesh.shape} {call!r}: {error}"[:250].replace("\n", " "), file=sys.stderr)
                reject()
            with open(folder / f"answers{self.rank}", "a") as file:
                file.write(f"{numbers[repr(call) + str(MeshPlan(tuple(mesh.shape)))]}\n")

    # Ranks look the class up by its name.
    Probe.__qualname__ = "Probe"
    globals()["Probe"] = Probe
    result = unittest.TestResult()
    Probe("probe").run(result)
    for _, text in result.failures + result.errors:
        print(text[-3000:], file=sys.stderr)
    counts = Counter(line for rank in range(4) for line in (folder / f"answers{rank}").read_text().split())
    return [example for number, example in enumerate(examples) if counts[str(number)] == 4]


# -- choosing and writing


def traits_of(example: Example) -> Iterator[str]:
    mesh, call = example["case"]
    kind = call.title.rpartition(".")[0] or "torch"
    yield call.title
    yield f"{kind} on a mesh of {' x '.join(map(str, mesh.shape))}"
    for tensor, placements in zip(call.tensors, call.placements, strict=True):
        yield f"{kind} of {str(tensor.dtype).removeprefix('torch.')}"
        for one in of_layout(tuple(tensor.shape), mesh.shape, placements):
            yield f"{kind}: {one}"
            yield one
    yield f"{min(len(call.tensors), 4)} tensors"


def phrase(example: Example) -> str:
    """Name the layouts of the tensors: the operation is in the call."""
    mesh, call = example["case"]
    pairs = zip(call.tensors, call.placements, strict=True)
    found = (one for tensor, chosen in pairs for one in of_layout(tuple(tensor.shape), mesh.shape, chosen))
    return ", ".join(dict.fromkeys(one for one in found if one != "replicated")) or "without elements"


def write(example: Example) -> str:
    mesh, call = example["case"]
    arguments = [repr(mesh.shape), repr(call.title), source_of(call.placements), *map(source_of, call.args)]
    arguments += [f"{name}={source_of(value)}" for name, value in call.kwargs.items()]
    return f"({phrase(example)!r}, on({', '.join(arguments)}))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only-answered", action="store_true", help="keep the calls that this torch answers, too")
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "3000")
    if parser.parse_args().only_answered:
        from dtensor_opinfo_examples import RESULTS

        tried = [example for _, example in RESULTS]
    else:
        sys.modules["dtensor_opinfo_examples"] = SimpleNamespace(RESULTS=[])  # type: ignore[assignment]
        tried = list(candidates())
    with tempfile.TemporaryDirectory() as folder:
        chosen = answered(tried, Path(folder))
    print(f"{len(chosen)} of {len(tried)} calls are answered", file=sys.stderr)
    if len(chosen) > MOST:
        chosen = [example for _, example in choose(chosen, traits_of, MOST, MOST)]
    chosen.sort(key=lambda example: example["case"][1].title)
    DATA.write_text(f"{HEADER}RESULTS = [{', '.join(map(write, chosen))}]\n")
    subprocess.run(["ruff", "check", "--select=I,F401", "--fix", "--quiet", DATA], check=True)
    subprocess.run(["ruff", "format", "--quiet", DATA], check=True)


if __name__ == "__main__":
    main()
