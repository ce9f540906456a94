"""The property suites catch faults in PyTorch: by an example that every run has, and a search by the smallest one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit import faults
from kit.faults import Case, SuiteFaultsTestCase, case_name, load
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.tensor import DTensor, Partial, Shard

from torch_testing_ext._hypothesis import hypothesis_internals
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.hypothesis_utils import Phase, settings

pytestmark = pytest.mark.nightly

redistribute = load("properties/test_redistribute_properties.py")
c10d = load("properties/test_c10d_properties.py")
checkpoint = load("properties/test_checkpoint_properties.py")
fully_shard = load("properties/test_fully_shard_properties.py")
opinfo = load("properties/test_dtensor_opinfo_properties.py")
functional = load("properties/test_functional_collectives_properties.py")
calls = importlib.import_module("functional_calls")

# -- faults


def shard_boundary_is_off_by_one(of_even_shards: bool = True) -> AbstractContextManager[Any]:
    """The first shard has one row too few, and the second one too many."""
    chunk = Shard._custom_chunk

    def chunk_wrongly(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
        first, second, *rest = parts = chunk(tensor, count, dim)
        if first.size(dim) < 2 or (tensor.size(dim) % count == 0 and not of_even_shards):
            return parts
        sizes = [first.size(dim) - 1, second.size(dim) + 1, *[part.size(dim) for part in rest]]
        return list(tensor.split(sizes, dim))

    return mock.patch.object(Shard, "_custom_chunk", staticmethod(chunk_wrongly))


def uneven_shard_boundary_is_off_by_one() -> AbstractContextManager[Any]:
    """The same if the shards differ in size. Of equal shards, it kills ranks in gloo, and deaths do not shrink."""
    return shard_boundary_is_off_by_one(of_even_shards=False)


def ranks_are_swapped_in_a_mesh() -> AbstractContextManager[Any]:
    """In each dim of a mesh, the first two ranks report each other's local rank."""
    local_rank = DeviceMesh.get_local_rank

    def swapped(mesh: DeviceMesh, dim: Any = None) -> int:
        rank = local_rank(mesh, dim)
        return 1 - rank if rank < 2 and mesh.size() > 1 else rank

    return mock.patch.object(DeviceMesh, "get_local_rank", swapped)


def group_ranks_are_not_translated() -> AbstractContextManager[Any]:
    """A rank within a group is used as the global rank."""
    return mock.patch.object(dist, "get_global_rank", lambda group, rank: rank)


def asynchronous_work_never_runs() -> AbstractContextManager[Any]:
    """An asynchronous collective does not run, as if `wait` returned too early."""

    class NeverRun:
        def wait(self) -> None:
            pass

    def skip_if_asynchronous(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, async_op: bool = False, **options: Any) -> Any:
            return NeverRun() if async_op else collective(*args, **options)

        return run

    names = ("all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter", "gather", "scatter", "all_to_all")
    return mock.patch.multiple(dist, **{name: skip_if_asynchronous(getattr(dist, name)) for name in names})


def last_part_is_not_read() -> AbstractContextManager[Any]:
    """Of the parts of a tensor that a rank reads from a checkpoint, the last is left out."""
    plan = planner_helpers.create_read_items_for_chunk_list

    def plan_without_the_last(*args: Any) -> list[Any]:
        items = plan(*args)
        return items[:-1] if len(items) > 1 else items

    return mock.patch.object(planner_helpers, "create_read_items_for_chunk_list", plan_without_the_last)


def gradients_are_summed() -> AbstractContextManager[Any]:
    """Gradients are the sums over the ranks, not the means."""
    return mock.patch.object(fsdp_collectives, "_get_gradient_divide_factors", summing)


def summing(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return (None, None, dist.ReduceOp.SUM, dist.ReduceOp.SUM)


def partial_sums_are_not_reduced() -> AbstractContextManager[Any]:
    """A rank takes its part of a sum for the whole."""
    return mock.patch.object(Partial, "_reduce_value", lambda partial, tensor, mesh, mesh_dim: tensor)


@contextmanager
def one_rank_refuses() -> Iterator[None]:
    """Rank 1 cannot assemble the result of an operation, while the others wait for it."""
    full_tensor = DTensor.full_tensor

    def refuse_in_one(tensor: DTensor, **options: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("planted")
        return full_tensor(tensor, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(DTensor, "full_tensor", refuse_in_one))
        stack.enter_context(mock.patch.object(opinfo, "LISTING_TIMEOUT", timedelta(seconds=1)))
        yield


def last_of_several_is_dropped() -> AbstractContextManager[Any]:
    """A coalesced collective returns the first result in place of the last."""
    names = ("all_reduce_coalesced", f"reduce_scatter_{calls.SUFFIX}_coalesced")

    def repeat_the_first(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            results = collective(*args, **options)
            return [*results[:-1], results[0]]

        return run

    module = calls.functional
    return mock.patch.multiple(module, **{name: repeat_the_first(getattr(module, name)) for name in names})


def gradients_are_local() -> AbstractContextManager[Any]:
    """The gradient of an all-gather is that of this rank's loss alone."""
    name = f"all_gather_{calls.SUFFIX}_autograd"

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, mine: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
            ctx.rank, ctx.size, ctx.dim = dist.get_rank(group), dist.get_world_size(group), dim
            return getattr(calls.functional, f"all_gather_{calls.SUFFIX}")(mine, dim, group) + 0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0].chunk(ctx.size, ctx.dim)[ctx.rank], None, None

    return mock.patch.object(calls.functional, name, Gather.apply)


def groups_are_sorted() -> AbstractContextManager[Any]:
    """A new group has its ranks in ascending order, whatever was asked for."""
    new_group = dist.new_group

    def sorted_group(ranks: list[int], **options: Any) -> Any:
        return new_group(sorted(ranks), **options)

    return mock.patch.object(dist, "new_group", sorted_group)


KINDS = r"[\w(=)]+"  # of placements
# One collective of one element: which one, and over which of the smallest groups, is the generator's choice.
ONE_STEP = r"\[\w+\(1(, root=\d)?(, sum)?\)\]"
CASES = [
    Case(
        redistribute.TestRedistribute,
        "test_on_1d_meshes",
        uneven_shard_boundary_is_off_by_one,
        rf": test_on_1d_meshes\(case=\(DTensor\(float32\[5\] on mesh\(4,\) as \({KINDS},\)\), "
        rf"tensor\(\[0., 1., 2., 3., 4.\]\), \({KINDS},\)\)\) fails on ",
    ),
    Case(
        redistribute.TestRedistribute,
        "test_on_2d_meshes",
        ranks_are_swapped_in_a_mesh,
        rf": test_on_2d_meshes\(case=\(DTensor\(float32\[1\] on mesh\([124], [124]\) as "
        rf"\({KINDS}, {KINDS}\)\), tensor\(\[[01].\]\), \({KINDS}, {KINDS}\)\)\) fails on ",
    ),
    Case(
        c10d.TestCollectives,
        "test_programs_in_every_group_of_a_partition",
        group_ranks_are_not_translated,
        rf": test_programs_in_every_group_of_a_partition\(partition=[\d |]+, "
        rf"programs=\{{1: {ONE_STEP}, 2: {ONE_STEP}, 3: {ONE_STEP}, 4: {ONE_STEP}\}}\) fails on ",
    ),
    Case(
        c10d.TestCollectives,
        "test_programs_over_the_world",
        asynchronous_work_never_runs,
        r": test_programs_over_the_world\(program=\[\w+\(1(, root=\d)?(, sum)?, async\)\]\) fails on ",
    ),
]


CASES += [
    Case(
        checkpoint.TestCheckpoints,
        "test_load_on_another_mesh",
        last_part_is_not_read,
        r": test_load_on_another_mesh\(case=\(tensor\(\[",
    ),
    Case(
        fully_shard.TestFullyShard,
        "test_training",
        gradients_are_summed,
        r": test_training\(.*\n*(.|\n)*gradient of",
    ),
    Case(opinfo.TestOpInfo, "test_results", partial_sums_are_not_reduced, r": test_results\("),
    Case(opinfo.TestOpInfo, "test_results", one_rank_refuses, r"refused: RuntimeError: planted"),
    Case(
        functional.TestFunctionalCollectives,
        "test_coalesced",
        last_of_several_is_dropped,
        r": test_coalesced\(",
    ),
    Case(
        functional.TestFunctionalCollectives,
        "test_gradients",
        gradients_are_local,
        r": test_gradients\(",
    ),
]

if not functional.OLD:  # it always sorts them
    CASES.append(
        Case(
            functional.TestGroups,
            "test_groups_with_options",
            groups_are_sorted,
            r": test_groups_with_options\(",
        )
    )


# -- by drawn examples: those of the derandomized generator, and enough of them for any generator to find the fault


@contextmanager
def drawing(test: Callable[..., None]) -> Iterator[None]:
    """Let a property draw examples and shrink the one that fails, without those that it replays."""
    chosen = settings(max_examples=2000, database=None, derandomize=True, phases=[Phase.generate, Phase.shrink])
    with mock.patch.object(test, hypothesis_internals.REPLAYED, None):
        hypothesis_internals.set_settings(test, chosen)
        yield


def by_drawing(case: Case) -> Case:
    @contextmanager
    def fault() -> Iterator[None]:
        with case.fault(), drawing(getattr(case.suite, case.test)):
            yield

    fault.__name__ = f"{case.fault.__name__}_by_drawing"
    return case._replace(fault=fault)


# The suite of the OpInfo database has replayed calls only: its search takes minutes.
DRAWN = [by_drawing(case) for case in CASES if case.suite is not opinfo.TestOpInfo]
BY_EXAMPLES = [Case(redistribute.TestRedistribute, "test_on_1d_meshes", shard_boundary_is_off_by_one), *CASES]
REPLAYED = [
    case if case.fault is one_rank_refuses else case._replace(message=rf"{case.test}\(.*one that every run has: ")
    for case in BY_EXAMPLES
]


class Faulty(faults.FaultySuites, cases=[*DRAWN, *REPLAYED]):
    pass


class PropertySuitesCatchFaultsTest(SuiteFaultsTestCase):
    @parametrize("case", REPLAYED, name_fn=case_name)
    def test_an_example_of_every_run_fails(self, case: Case) -> None:
        self.assert_caught(Faulty, case)

    @parametrize("case", DRAWN, name_fn=case_name)
    def test_the_smallest_example_is_reported(self, case: Case) -> None:
        self.assert_caught(Faulty, case)


instantiate_parametrized_tests(PropertySuitesCatchFaultsTest)

if __name__ == "__main__":
    run_tests()
