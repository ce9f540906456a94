"""Slips of one rank in whole worlds, as tables: what is said of each, and that sound programs beside it stay quiet."""

import asyncio
import functools
import math
import unittest
from pathlib import Path

import pytest
import torch.distributed as dist
import world_slips as slips

from torch_testing_ext.common_distributed import RankError, RankFailure
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.worlds import check_world, whole_world

FILE = Path(slips.__file__)
LINES = FILE.read_text().splitlines()
# Of each table, so many programs run by default; the others are slow, all together.
QUICK = 3


def fault_of(function):
    """The line of a function that has the mark of a fault."""
    first = function.__code__.co_firstlineno
    last = max(line for *_, line in function.__code__.co_lines() if line)
    (number,) = [number for number in range(first, last + 1) if LINES[number - 1].endswith("# fault")]
    return number


def each(cases, names=None):
    """A mark that runs a test with each of these cases."""
    cases = list(cases)
    names = names or [getattr(case, "__name__", None) or str(case) for case in cases]
    params = [
        pytest.param(case, id=name, marks=[pytest.mark.nightly] * (number >= QUICK))
        for number, (case, name) in enumerate(zip(cases, names, strict=True))
    ]
    return pytest.mark.parametrize("case", params)


def sound(cases):
    """A mark that runs a test with each of the first cases alone, and with all others in one world.

    A failure names its line, and with it the program.
    """
    cases = list(cases)
    params = [pytest.param([case], id=getattr(case, "__name__", None) or str(case)) for case in cases[:QUICK]]
    params.append(pytest.param(cases[QUICK:], id="others", marks=pytest.mark.nightly))
    return pytest.mark.parametrize("cases", params)


def failure_of(function, size, *args, **options):
    with pytest.raises((RankError, RankFailure)) as caught:
        check_world(function, size, *args, **options)
    return caught.value


# -- DDP


@each(slips.DDP)
def test_ddp(case):
    error = failure_of(case, 3, True)
    assert f"{FILE.name}:" in error.account
    hangs = case not in (slips.ddp_barrier_in_its_group, slips.ddp_other_width, slips.ddp_clip_on_one_rank)
    assert type(error) is (RankError if hangs else RankFailure), error


@sound(slips.DDP)
def test_sound_ddp(cases):
    assert check_world(slips.in_turn, 3, cases, False).warnings == []


def test_a_cycle_through_the_reducer():
    text = failure_of(slips.ddp_metric_first, 3, True).failure.title
    assert text.startswith("rank 0 waits in group 1 (all_reduce #1")
    assert "for rank 1, which waits in the default group (all_reduce #4" in text


def test_each_step_of_ddp_is_a_link():
    # Its construction: a comparison of shapes and a broadcast; then the buckets of three steps.
    chains = [check_world(slips.ddp_step_more, 2, False).longest_chain for _ in range(1)]
    fewer = check_world(slips.ddp_step_fewer, 2, False).longest_chain
    assert fewer == chains[0] + 1


# -- values that a whole world does not know


@each(slips.BRANCHES)
def test_branch(case):
    error = failure_of(case, 3)
    said = f"line {fault_of(case)} read a value that a whole world does not know, so this need not be true: "
    assert str(error).startswith(said)


@sound(slips.READS)
def test_sound_read(cases):
    check_world(slips.in_turn, 3, cases)


@sound(slips.UNREAD)
def test_no_read(cases):
    """No size depends on the values."""
    assert check_world(slips.in_turn, 3, cases).warnings == []


# -- objects


@each(slips.OBJECT_CALLS)
def test_objects(case):
    error = failure_of(slips.OBJECT_CALLS[case], 3)
    assert f"raised NotForWorlds: the program calls {case.partition(',')[0]}()" in str(error).splitlines()[0]


@each([slips.saves, slips.loads])
def test_checkpoint(case, tmp_path):
    error = failure_of(case, 2, tmp_path)
    assert "the program has a distributed checkpoint" in str(error).splitlines()[0]
    assert "no_dist=True" in str(error).splitlines()[0]
    assert f"{FILE.name}:{fault_of(case)}" in str(error)


@pytest.mark.slow
def test_checkpoint_of_each_rank_alone(tmp_path):
    check_world(slips.saves_alone, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


# -- work


@each(slips.WORKS)
def test_work_that_nobody_waits_for(case):
    error = failure_of(slips.leaves_work, 2, case)
    assert str(error).startswith("rank 0: nobody waited for the work of ")
    assert case.partition(" ")[0] in str(error).splitlines()[0]


@sound(slips.WORKS)
def test_awaited_work(cases):
    check_world(slips.in_turn, 2, [functools.partial(slips.waits_for_work, op=case) for case in cases])


@sound(slips.WORKS)
def test_work_whose_future_is_awaited(cases):
    check_world(slips.in_turn, 2, [functools.partial(slips.waits_for_future, op=case) for case in cases])


@each(slips.WRITES)
def test_buffer_before_wait(case):
    error = failure_of(slips.uses_before_wait, 2, case)
    assert type(error) is RankFailure
    assert str(error).startswith("rank 0: a buffer of all_reduce [4] float32 was ")
    assert "before wait()" in str(error).splitlines()[0]


@sound(slips.WRITES)
def test_buffer_after_wait(cases):
    check_world(slips.in_turn, 2, [functools.partial(slips.uses_after_wait, use=case) for case in cases])


# -- receives from anybody


@each([(3, 1), (4, 1), (7, 2), (1, 0), (5, 1), (6, 2), (8, 2), (2, 0), (10, 3), (9, 2), (4, 0), (11, 3)])
def test_too_few_for_anybody(case):
    received, sent = case
    if 3 * sent == received:
        assert check_world(slips.any_receives, 4, received, sent).calls(op="recv") == [received, 0, 0, 0]
        return
    error = failure_of(slips.any_receives, 4, received, sent)
    assert type(error) is RankError
    assert f"rank 0 is waiting in recv #{3 * sent + 1} from any rank" in str(error).splitlines()[0]
    assert f"{FILE.name}:{fault_of(slips.any_receives)}" in str(error)


@each([slips.any_answers, slips.any_in_background])
def test_sound_receives_from_anybody(case):
    check_world(case, 4)


# -- chains


@each(slips.CHAINS)
def test_chain(case):
    groups, length = case
    assert check_world(slips.chain_of, 5, groups).longest_chain == length


@pytest.mark.parametrize("buffered", [True, False])
def test_chain_of_messages(buffered):
    for program, length in ((slips.chain_of_messages, 3), (slips.chain_of_pairs, 1)):
        assert check_world(program, 4, buffered_sends=buffered).longest_chain == length
    assert check_world(slips.chain_without_waits, 2).longest_chain == 1


# -- one rank of many


@each(slips.ODD)
def test_odd_rank(case):
    error = failure_of(slips.odd_rank, 8, case)
    first, screen = str(error).splitlines()[0], str(error)
    assert "rank 5" in first
    assert any("rank 5 " in row for row in screen.splitlines()[1:4])
    if "exits" not in case and "killed" not in case:
        line = slips.unequal.__code__.co_firstlineno + 1 if case == "fails" else slips.ODD[case].__code__.co_firstlineno
        assert f"{FILE.name}:{line}" in screen


# -- the default group


@each(
    [
        ((), {}),
        (("gloo",), {}),
        ((), {"backend": "gloo"}),
        (("gloo",), {"world_size": 2}),
    ],
    ["without arguments", "of gloo", "by name", "with the size"],
)
def test_second_default_group(case):
    args, kwargs = case
    error = failure_of(functools.partial(slips.makes_twice, **kwargs), 2, *args)
    assert "raised ValueError: trying to initialize the default process group twice. The test has" in str(error)
    assert f"{FILE.name}:{fault_of(slips.makes_twice)}" in str(error)


def test_default_group_again():
    check_world(slips.makes_again, 2)


# -- tests that run nothing, sizes and times


async def waits(rank, world_size):
    raise AssertionError


def yields(rank, world_size):
    yield
    raise AssertionError


async def waits_and_yields(rank, world_size):
    yield
    raise AssertionError


class Calls:
    async def __call__(self, rank, world_size):
        raise AssertionError

    async def method(self, rank, world_size):
        raise AssertionError


def decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


NOTHING = {
    "async def": waits,
    "yield": yields,
    "both": waits_and_yields,
    "partial of async def": functools.partial(waits),
    "partial of yield": functools.partial(yields),
    "method": Calls().method,
    "callable": Calls(),
    "decorated": decorated(waits),
    "decorated twice": decorated(decorated(yields)),
    "lambda of async def": lambda rank, world_size: waits(rank, world_size),
    "lambda of yield": lambda rank, world_size: yields(rank, world_size),
    "lambda of both": lambda rank, world_size: waits_and_yields(rank, world_size),
    "list": lambda rank, world_size: [waits(rank, world_size) for _ in range(2)],
    "tuple": lambda rank, world_size: (None, waits(rank, world_size)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_runs_nothing(name):
    for run in (lambda: check_world(NOTHING[name], 2), lambda: whole_world(2)(NOTHING[name])()):
        with pytest.raises((TypeError, RankError), match="nothing: it is `async def`, or contains `yield`"):
            run()


@pytest.mark.parametrize("lazy", [map, filter])
def test_what_runs_nothing_until_it_is_read(lazy):
    with pytest.raises(RankError, match=rf"{lazy.__name__}\(\) ran nothing: make a list of it"):
        check_world(lambda rank, size: lazy(decorated, range(size)), 2)


def test_what_runs_by_itself():
    async def body():
        dist.barrier()

    assert check_world(lambda rank, size: asyncio.run(body()), 2).calls() == [1, 1]
    assert check_world(lambda rank, size: list(range(size)), 2).calls() == [0, 0]


def test_the_decorator_without_parentheses():
    with pytest.raises(TypeError, match=r"@whole_world needs the size of the world: @whole_world\(8\)"):
        whole_world(decorated)


@pytest.mark.parametrize("cls", [Calls, type("Suite", (unittest.TestCase,), {}), type("Plain", (), {})])
def test_the_decorator_on_a_class(cls):
    """Its tests would be gone."""
    with pytest.raises(TypeError, match=f"@whole_world is for a test, and {cls.__qualname__} is a class"):
        whole_world(2)(cls)


def test_the_decorator_twice():
    with pytest.raises(TypeError, match=r"^decorated has @whole_world already; give it once$"):
        whole_world(2)(whole_world(4)(decorated))


WRONG = [
    *(("buffered_sends", value) for value in ("no", 1, None)),
    *(("world_size", value) for value in ("8", 1.5, None, True, [2], 0, -1, 16_385, 1_000_000, 10**12)),
    *(("timeout", value) for value in ("60", None, True, 0, -1, math.nan, math.inf, [60])),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_sizes_and_times(name, value):
    options = {"world_size": 2, name: value}
    for refuse in (lambda: check_world(decorated, **options), lambda: whole_world(**options)):
        with pytest.raises(
            (TypeError, ValueError), match=r"world_size is|timeout is|buffered_sends is|a world has at least one rank"
        ):
            refuse()


if __name__ == "__main__":
    run_tests()
