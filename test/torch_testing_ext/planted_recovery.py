"""Programs that lose a rank and go on, with one bug each, and what is said about them; and without the bugs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from kit.ranks import Ranks

from torch_testing_ext.faults import call, fault_point, faults, heal, kill, mark, raises, reached, restart, slow, stop

STEPS, LOST = 4, 2
# Of a program that hangs; and of one that ends by itself, also on a loaded machine.
SOON, LONG = 2.0, 60.0


class Training(Ranks):
    """Adds up numbers over all ranks in each step. When a rank is lost, the others form a new world and go on."""

    world_size = 3
    retries_for_ever = catches_too_much = waits_before_destroy = keeps_old_size = keeps_old_ranks = False
    keeps_old_group = counts_twice = skips_step = returns_early = never_recovers = False
    waits_for_the_dead = parts = is_slow = crashes_then = ends_then = leaves_group_open = False
    awaits_a_farewell = takes_unfinished_sums = False

    def join(self, world: int, rank: int, size: int) -> None:
        store = dist.FileStore(f"{self.file_name}.{world}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))

    def train(self) -> None:
        self.join(0, self.rank, 3)
        self.total, done = 0.0, 0
        while done < STEPS:
            # Outside of the `except`: an exception in flight keeps the group, and so its connections.
            if self.has_lost_a_peer_in(done):
                if self.rank == LOST:
                    return self.leave()
                if self.retries_for_ever:
                    continue
                if self.catches_too_much:
                    break
                done = self.recover(done)
            else:
                done += 1
        if not self.catches_too_much:
            self.assertEqual(self.total, self.expected())

    def has_lost_a_peer_in(self, number: int) -> bool:
        caught: type[Exception] = Exception if self.catches_too_much else RuntimeError
        try:
            self.step(number)
        except caught:
            return True
        return False

    def step(self, number: int) -> None:
        value = torch.tensor([float(number + 1)])
        is_over = False
        try:
            dist.all_reduce(value)
            is_over = True
        finally:
            if is_over or self.takes_unfinished_sums:
                self.total += value.item()

    def leave(self) -> None:
        """The rank is not lost: it only has an exception. A dead one says no farewell."""
        dist.FileStore(f"{self.file_name}.farewell", 3).set("left", "")
        dist.destroy_process_group()

    def expected(self) -> float:
        """The sum: three ranks take the first two steps, two take the rest."""
        return float(3 * (1 + 2) + 2 * (3 + 4))

    def recover(self, done: int) -> int:
        if self.waits_before_destroy:
            dist.barrier()
        if self.crashes_then and self.rank == 1:
            os.abort()
        if self.ends_then and self.rank == 1:
            os._exit(0)
        if self.is_slow and self.rank == 1:
            time.sleep(1000)
        if self.awaits_a_farewell:
            dist.FileStore(f"{self.file_name}.farewell", 3).wait(["left"], timedelta(seconds=60))
        if self.waits_for_the_dead:
            dist.FileStore(f"{self.file_name}.ready", 3).wait([f"rank{LOST}"], timedelta(seconds=60))
        if self.returns_early and self.rank == 1:
            return STEPS
        if not self.keeps_old_group and not self.leaves_group_open:
            dist.destroy_process_group()
        if not self.keeps_old_group:
            size = 3 if self.keeps_old_size else 2
            self.join(1, self.rank + 1 if self.keeps_old_ranks else self.rank, size)
        if self.parts and self.rank == 1:
            dist.barrier()
        if not self.never_recovers:
            reached("recovered")
        if self.counts_twice:
            self.total += 1
        return done + 1 if self.skips_step else done

    @faults(kill(LOST, at=call(3, "all_reduce")), within=LONG, must_reach=["recovered"])
    def survives(self) -> None:
        self.train()

    @faults(kill(LOST, at=call(3, "all_reduce")), within=SOON, must_reach=["recovered"])
    def survives_soon(self) -> None:
        self.train()

    @faults(kill(LOST, at=call(3, "all_reduce", phase="during")), within=LONG, must_reach=["recovered"])
    def survives_in_flight(self) -> None:
        self.train()

    @faults(raises(RuntimeError("planned"), rank=LOST, at=call(3, "all_reduce")), within=20)
    def survives_a_faked_death(self) -> None:
        self.train()


class Checkpoints(Ranks):
    """Rank 1 saves a file in each step, dies while it does, and begins again from the last file that is whole."""

    world_size = 2
    writes_in_place = ignores_checkpoint = has_old_seed = saves_at_its_end = meets_once_more = False

    def train(self) -> None:
        file = f"{self.file_name}.checkpoint"
        first = 0
        if self.rank == 1 and self.incarnation and not self.ignores_checkpoint and os.path.exists(file):
            first = torch.load(file)["step"]
            reached("loaded")
        for step in range(first, 3) if self.rank == 1 else ():
            torch.manual_seed(0 if self.has_old_seed else step)
            with open(f"{self.file_name}.drawn", "a") as drawn:
                drawn.write(f"{torch.rand(1).item()}\n")
            if self.saves_at_its_end:
                signal.signal(signal.SIGTERM, lambda *_, step=step: torch.save({"step": step + 1}, file))
                fault_point("saving")
                continue
            unfinished = file if self.writes_in_place else f"{file}.new"
            with open(unfinished, "wb") as target:
                target.write(b"half of it")
                target.flush()
                fault_point("saving")
                target.seek(0)
                target.truncate()
                torch.save({"step": step + 1}, target)
            os.replace(unfinished, file)
        self.join_group()
        if self.meets_once_more and self.incarnation:
            dist.barrier()
        dist.barrier()
        if self.rank == 0:
            with open(f"{self.file_name}.drawn") as drawn:
                numbers = drawn.read().split()
            self.assertTrue(len(set(numbers)) == 3, "the numbers of each step are new")
            self.assertTrue(len(numbers) == 4, "one step was begun twice")

    @faults(kill(1, at=mark("saving", 2)), restart(1), within=10, must_reach=["loaded"])
    def resumes(self) -> None:
        self.train()


class Watching(Ranks):
    """A rank that stands still, or fails alone: the others must see it."""

    world_size = 2
    has_no_timeout = goes_on_alone = never_heals = skips_point = forgets_to_reach = False

    def meet(self, seconds: float) -> None:
        """Meet once, however long that takes; from then on, the group waits this long."""
        self.join_group()
        dist.barrier()
        c10d._set_pg_timeout(timedelta(seconds=seconds))

    def see_that_a_rank_stands_still(self) -> None:
        self.meet(LONG if self.has_no_timeout else 0.2)
        with contextlib.suppress(RuntimeError):
            dist.barrier()

    @faults(stop(rank=1, at=call(2)), within=LONG)
    def sees_that_a_rank_stands_still(self) -> None:
        self.see_that_a_rank_stands_still()

    @faults(stop(rank=1, at=call(2)), within=SOON)
    def sees_it_soon(self) -> None:
        self.see_that_a_rank_stands_still()

    @faults(stop(rank=1, at=mark("there")), within=LONG, must_reach=["together"])
    def heals(self) -> None:
        self.join_group()
        if not self.skips_point:
            fault_point("there")
        if self.rank == 0 and not (self.never_heals or self.skips_point):
            heal(1)
        if self.never_heals and self.rank == 0:
            return
        dist.barrier()
        if not self.forgets_to_reach:
            reached("together")

    @faults(raises(MemoryError("planned"), rank=1, at=call(2)), within=LONG)
    def agrees_to_skip(self) -> None:
        self.join_group()
        for _ in range(3):
            try:
                dist.all_reduce(torch.ones(1))
            except MemoryError:
                if not self.goes_on_alone:
                    dist.all_reduce(torch.ones(1))

    @faults(slow(0.4, 1, at=call(2)), within=LONG)
    def tolerates_a_slow_rank(self) -> None:
        self.meet(0.1 if self.has_no_timeout else LONG)
        dist.barrier()


@dataclass(frozen=True)
class Planted:
    """A program with a bug, by the attribute that plants it. `told`: parts of the first two lines of the message."""

    cls: type[Ranks]
    test: str
    bug: str
    told: tuple[str, ...]

    def __post_init__(self) -> None:
        # The module has the class: a server that was forked before the test can run it.
        globals().setdefault(self._name, type(self._name, (self.cls,), {self.bug: True}))

    @property
    def _name(self) -> str:
        return f"{self.cls.__name__}_{self.bug}"

    def case(self) -> Any:
        return globals()[self._name](self.test)


AFTER = "rank 2 was killed at all_reduce #3 by the fault"
IN_FLIGHT = "rank 2 was killed during all_reduce #3 by the fault"
LOADING = "after rank 1 was killed at 'saving' #2 by the fault"
BUGS = (
    Planted(Training, "survives_soon", "retries_for_ever", (AFTER, "timed out")),
    Planted(Training, "survives", "catches_too_much", (AFTER, "no rank has reached 'recovered'")),
    Planted(Training, "survives", "waits_before_destroy", (AFTER, "RuntimeError")),
    Planted(Training, "survives_soon", "keeps_old_size", (AFTER, "timed out")),
    Planted(Training, "survives_soon", "keeps_old_ranks", (AFTER,)),
    Planted(Training, "survives_soon", "keeps_old_group", (AFTER,)),
    Planted(Training, "survives", "leaves_group_open", (AFTER, "ValueError: trying to initialize")),
    Planted(Training, "survives", "counts_twice", (AFTER, "Scalars are not close")),
    Planted(Training, "survives", "skips_step", (AFTER, "Scalars are not close")),
    Planted(Training, "survives_soon", "returns_early", (AFTER,)),
    Planted(Training, "survives", "never_recovers", (AFTER, "no rank has reached 'recovered'")),
    Planted(Training, "survives_soon", "waits_for_the_dead", (AFTER, "rank 2")),
    Planted(Training, "survives_soon", "parts", (AFTER,)),
    Planted(Training, "survives_soon", "awaits_a_farewell", (AFTER, "timed out")),
    Planted(Training, "survives_in_flight", "takes_unfinished_sums", (IN_FLIGHT, "Scalars are not close")),
    Planted(Training, "survives_soon", "is_slow", (AFTER, "timed out")),
    Planted(Training, "survives", "crashes_then", (AFTER, "rank 1 of 3 was killed by SIGABRT")),
    Planted(Training, "survives", "ends_then", (AFTER, "rank 1 of 3 exited with code 0 before the test finished")),
    Planted(Checkpoints, "resumes", "writes_in_place", (LOADING, "rank 1 of 2 raised")),
    Planted(Checkpoints, "resumes", "ignores_checkpoint", (LOADING, "rank 0 of 2 failed")),
    Planted(Checkpoints, "resumes", "saves_at_its_end", (LOADING, "rank 0 of 2 failed")),
    Planted(Checkpoints, "resumes", "meets_once_more", (LOADING, "rank 1")),
    Planted(Checkpoints, "resumes", "has_old_seed", (LOADING, "the numbers of each step are new")),
    Planted(Watching, "sees_it_soon", "has_no_timeout", ("rank 1 was stopped at barrier #2",)),
    Planted(Watching, "heals", "skips_point", ("did not happen: rank 1 came to 0 passages of 'there'",)),
    Planted(Watching, "heals", "never_heals", ("rank 1 was stopped at 'there' #1", "no rank has reached 'together'")),
    Planted(Watching, "heals", "forgets_to_reach", ("no rank has reached 'together'",)),
    Planted(Watching, "agrees_to_skip", "goes_on_alone", ("rank 1 raised MemoryError at all_reduce #2",)),
    Planted(Watching, "tolerates_a_slow_rank", "has_no_timeout", ("rank 1 was delayed at barrier #2",)),
)
FIXED: tuple[Callable[[], Any], ...] = (
    # A death that is only faked does not find this bug.
    Planted(Training, "survives_a_faked_death", "awaits_a_farewell", ()).case,
    lambda: Watching("sees_that_a_rank_stands_still"),
    # On a loaded machine, what is right may not be soon.
    *(
        lambda cls=cls, test=test: cls(test)
        for cls, test in dict.fromkeys((bug.cls, bug.test) for bug in BUGS if not bug.test.endswith("_soon"))
    ),
)
