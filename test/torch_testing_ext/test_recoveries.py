"""Recoveries: deaths in turn, exceptions that must be caught, what must run after a fault, and hangs after one."""

import contextlib
import os
import subprocess
import sys
import time
import unittest
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.ranks import Ranks, wait_for
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
from torch_testing_ext.common_fsdp import FSDPTest
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_testing_ext.faults import (
    call,
    calls,
    fault_point,
    fault_sweep,
    faults,
    kill,
    mark,
    raises,
    reached,
    restart,
    segv,
)


def all_reduce_until_one_dies():
    with contextlib.suppress(RuntimeError):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))


class Recovering(Ranks):
    """Programs: each method is a test of its own, by `outcome_of`."""

    world_size = 3

    def join(self, world, rank=None, size=None, seconds=60):
        """Join one world after another; `seconds`: the time-out of its calls."""
        size = size or self.world_size
        store = dist.FileStore(f"{self.file_name}.{world}", size)
        rank = self.rank if rank is None else rank
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))

    def lose_rank_2(self):
        """The others go on in a world of their own."""
        self.join(0)
        try:
            for _ in range(3):
                dist.all_reduce(torch.ones(1))
        except RuntimeError:
            pass
        dist.destroy_process_group()
        self.join(1, size=2)

    # -- exceptions

    @faults(raises(OSError("disk"), rank=1, at=mark("save")))
    def saves_without_a_retry(self):
        fault_point("save")
        reached("saved")

    @faults(raises(OSError("disk"), rank=1, at=mark("save")), must_reach=["saved"])
    def saves_again(self):
        try:
            fault_point("save")
        except OSError:
            fault_point("save")
        reached("saved")

    @faults(raises(OSError("disk"), rank=1, at=mark("save"), ends_rank=True))
    def ends_by_it(self):
        fault_point("save")

    @faults(raises(OSError("disk"), rank=1, at=mark("save")), restart(1), must_reach=["again"])
    def starts_again_after_it(self):
        if self.incarnation:
            reached("again")
        fault_point("save")

    # -- deaths in turn

    @faults(
        kill(1, at=mark("load")),
        segv(1, at=mark("load", incarnation=1)),
        restart(1, times=2),
        must_reach=["loaded twice"],
    )
    def dies_while_it_heals(self):
        fault_point("load")
        if self.incarnation == 2:
            reached("loaded twice")

    @faults(kill(1, at=mark("load")), kill(1, at=mark("load", incarnation=1)), restart(1))
    def is_given_up(self):
        """The second death is the last."""
        fault_point("load")

    @faults(kill(1, at=mark("load")), kill(1, at=mark("never", incarnation=1)), restart(1))
    def does_not_die_again(self):
        fault_point("load")

    # -- names that must be reached

    @faults(kill(2, at=mark("go")), must_reach=["here"])
    def reaches_it_before(self):
        reached("here")
        self.wait_for_all()
        fault_point("go")

    @faults(kill(2, at=mark("go")), must_reach=["here"])
    def reaches_it_before_and_after(self):
        reached("here")
        pid = self.wait_for_all()
        fault_point("go")
        if self.rank == 0:
            wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
            reached("here")

    def wait_for_all(self):
        """Returns the process of rank 2."""
        store = dist.FileStore(f"{self.file_name}.all", 3)
        store.set(f"{self.rank}", str(os.getpid()))
        store.wait(["0", "1", "2"], timedelta(seconds=60))
        return int(store.get("2"))

    # -- hangs after a recovery

    @faults(kill(2, at=call(2)), within=4)
    def hangs_in_python(self):
        self.lose_rank_2()
        time.sleep(1000)

    @faults(kill(2, at=call(2)), within=20)
    def parts_in_the_new_world(self):
        self.lose_rank_2()
        total = torch.ones(1, dtype=torch.int64 if self.rank else torch.float64)
        dist.all_reduce(total)
        self.assertEqual(total.item(), 2)

    def meet_again(self, seconds=60):
        """After rank 2 has begun again, all are in a new world."""
        if not self.incarnation:
            self.join(0)
            all_reduce_until_one_dies()
            dist.destroy_process_group()
        self.join(1, seconds=seconds)

    @faults(kill(2, at=call(2)), restart(2), within=15)
    def calls_more_after_the_restart(self):
        """The second process of rank 2 is in a barrier, the others in an all_reduce."""
        self.meet_again()
        if self.incarnation:
            dist.barrier()
        dist.all_reduce(torch.ones(1))

    @faults(kill(2, at=call(2)), restart(2))
    def calls_time_out_after_the_restart(self):
        """The same, in which torch gives up first."""
        self.meet_again(seconds=1)
        if self.incarnation:
            dist.barrier()
        dist.all_reduce(torch.ones(1))

    @faults(kill(2, at=call(2)), restart(2))
    def parts_after_the_restart(self):
        """It fails by what the mismatch has given."""
        self.meet_again()
        total = torch.ones(1, dtype=torch.int64 if self.rank == 0 else torch.float64)
        dist.all_reduce(total)
        self.assertEqual(total.item(), 3)

    @faults(kill(2, at=call(2)), restart(2))
    def parts_without_an_error_after_the_restart(self):
        self.meet_again()
        dist.all_reduce(torch.ones(1, dtype=torch.int64 if self.rank == 0 else torch.float64))

    @faults(kill(2, at=call(2)))
    def parts_without_an_error(self):
        self.lose_rank_2()
        dist.all_reduce(torch.ones(1, dtype=torch.int64 if self.rank == 0 else torch.float64))

    @faults(kill(2, at=call(2)), restart(2))
    def agrees_after_the_restart(self):
        """In the world that was lost, each has gone on by itself."""
        if not self.incarnation:
            self.join(0)
            for dtype in (torch.float32, torch.float32, torch.int64 if self.rank else torch.float64):
                with contextlib.suppress(RuntimeError):
                    dist.all_reduce(torch.ones(1, dtype=dtype))
            dist.destroy_process_group()
        self.join(1)
        dist.all_reduce(torch.ones(1))

    @faults(kill(1, at=mark("load")), kill(1, at=mark("again")), restart(1))
    def dies_at_a_point_of_the_first_process(self):
        fault_point("load")
        fault_point("again")


class Pair(Recovering):
    world_size = 2

    def goes_on_after_an_error(self):
        """Without any fault: the call that has raised is over."""
        self.join(0)
        if self.rank == 1:
            return
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(2))
        time.sleep(1000)


class Sweeps(Ranks):
    world_size = 2

    @fault_sweep(kill, at=calls())
    def has_no_call(self):
        fault_point("alone")


class OfDTensor(DTensorTestBase):
    world_size = 2

    @with_comms
    @faults(kill(1, at=call(2)), within=60)
    def survives(self):
        all_reduce_until_one_dies()


class OfFSDP(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @faults(kill(1, at=call(2)), within=60)
    def survives(self):
        all_reduce_until_one_dies()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @faults(kill(1, at=mark("trained")), within=60)
    def trains(self):
        model = self.train_once()
        with contextlib.suppress(RuntimeError):
            model(torch.ones(1, 4))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @faults(kill(1, at=mark("trained")), within=60)
    def trains_on(self):
        self.train_once()(torch.ones(1, 4))

    def train_once(self):
        model = fully_shard(nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        fault_point("trained")
        return model


class RecoveryTest(unittest.TestCase):
    def assert_passes(self, test):
        self.assertEqual(outcome_of(test), ("passed", ""))

    def assert_told(self, test, *texts):
        seen = outcome_of(test)
        self.assertIn(seen.outcome, ("failed", "error"), seen.message)
        first = seen.message.partition("common_distributed.Rank")[2].partition("\n")[0]
        for text in texts:
            self.assertIn(text, first, seen.message)
        return seen.message

    def test_an_exception_that_nobody_catches(self):
        self.assert_told(
            Recovering("saves_without_a_retry"),
            "rank 1 of 3 did not catch OSError, which the fault raised at 'save' #1",
        )
        for name in ("saves_again", "ends_by_it", "starts_again_after_it"):
            with self.subTest(name):
                self.assert_passes(Recovering(name))

    def test_deaths_in_turn(self):
        for name in ("dies_while_it_heals", "is_given_up"):
            with self.subTest(name):
                self.assert_passes(Recovering(name))
        self.assert_told(
            Recovering("does_not_die_again"), "kill(rank=1, at=mark('never', incarnation=1)) did not happen"
        )

    def test_a_name_counts_after_the_fault(self):
        self.assert_told(Recovering("reaches_it_before"), "no rank has reached 'here' after the fault")
        self.assert_passes(Recovering("reaches_it_before_and_after"))

    def test_hangs_are_told_by_where_the_ranks_are(self):
        message = self.assert_told(Recovering("hangs_in_python"), "timed out after")
        self.assertNotIn("waiting in it", message)
        self.assertIn("in hangs_in_python", message)

    def test_a_mismatch_in_the_new_world(self):
        self.assert_told(
            Recovering("parts_in_the_new_world"), "calls all_reduce [1] int64", "in call #1 of the default group"
        )

    def test_a_mismatch_after_a_restart(self):
        for name in ("parts_after_the_restart", "parts_without_an_error_after_the_restart"):
            with self.subTest(name):
                told = "rank 0 calls all_reduce [1] int64 sum, the others call all_reduce [1] float64 sum in call #1"
                message = self.assert_told(Recovering(name), "after rank 2 was killed", told)
                self.assertRegex(message, r"\n  rank 0  .*test_recoveries.py:\d+")
        self.assert_told(Recovering("parts_without_an_error"), "calls all_reduce [1] int64 sum", "in call #1")
        self.assert_passes(Recovering("agrees_after_the_restart"))

    def test_a_fault_of_a_process_that_has_died(self):
        told = "did not happen: its process had ended before; incarnation=1 is the next one of the rank"
        self.assert_told(Recovering("dies_at_a_point_of_the_first_process"), told)

    def test_calls_of_a_dead_process_are_not_compared_with_those_of_the_next(self):
        for name in ("calls_more_after_the_restart", "calls_time_out_after_the_restart"):
            with self.subTest(name):
                told = "rank 2 calls barrier, the others call all_reduce"
                self.assertNotIn("never reached", self.assert_told(Recovering(name), told))

    def test_a_call_that_has_raised_is_over(self):
        with mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", 4.0):
            message = self.assert_told(Pair("goes_on_after_an_error"), "timed out after")
        self.assertNotIn("never reached", message)

    def test_a_sweep_that_tries_nothing(self):
        self.assert_told(
            Sweeps("has_no_call"), "the sweep has tried no fault: its ranks pass no point of the kind: call"
        )

    def test_a_base_with_a_barrier_at_its_end_survives_a_death(self):
        self.assert_passes(OfDTensor("survives"))
        for name in ("survives", "trains"):
            with self.subTest(name):
                self.assert_passes(OfFSDP(name))
        self.assert_told(
            OfFSDP("trains_on"), "after rank 1 was killed at 'trained' #1 by the fault: rank 0 of 2 raised RuntimeError"
        )


class RefusedTest(unittest.TestCase):
    def refuses(self, text, make):
        with self.assertRaises(ValueError) as raised:
            make()
        self.assertIn(text, str(raised.exception))

    def test_nobody_is_left_to_judge(self):
        both = faults(kill(0, at=call(1)), kill(1, at=call(1)))(lambda self: None)
        all_die = type("AllDie", (Ranks,), {"dies": both, "world_size": 2})
        alone = type("Alone", (Ranks,), {"dies": faults(kill(0, at=call(1)))(lambda self: None), "world_size": 1})
        for bad in (all_die, alone):
            self.assertIn("no rank is left to judge", outcome_of(bad("dies")).message)

    def test_deaths_that_no_process_can_have(self):
        self.refuses("add restart(1, times=1)", lambda: faults(kill(1, at=call(1, incarnation=1))))
        self.refuses("faults end its processes [0]", lambda: faults(kill(1, at=call(1)), restart(1, times=2)))
        self.refuses("incarnation is -1", lambda: mark("x", incarnation=-1))

    def test_names_are_texts(self):
        self.refuses("give a list of names", lambda: faults(kill(1, at=call(1)), must_reach=[3]))


class PointsThatStandAloneTest(unittest.TestCase):
    FILE = Path(__file__).resolve().parents[2] / "torch_testing_ext_points.py"

    def test_production_imports_nothing_of_the_kit(self):
        """In a new interpreter, since this one has the kit."""
        source = (
            "import sys; before = set(sys.modules); hooks = list(sys.meta_path); "
            "import torch_testing_ext_points as points; "
            "points.fault_point('save'); points.reached('saved'); assert sys.meta_path == hooks; "
            "print(*sorted(set(sys.modules) - before))"
        )
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=self.FILE.parent, stdout=subprocess.PIPE, text=True, check=True
        )
        self.assertEqual(done.stdout.split(), ["torch_testing_ext_points"])

    def test_a_test_finds_them(self):
        names = {}
        exec(self.FILE.read_text(), names)
        from torch_testing_ext import fault_points

        seen = []

        class Rank:
            def mark(self, name):
                seen.append(("mark", name))

            def reached(self, name):
                seen.append(("reached", name))

        before, fault_points.rank = fault_points.rank, Rank()
        try:
            names["fault_point"]("save")
            names["reached"]("saved")
        finally:
            fault_points.rank = before
        self.assertEqual(seen, [("mark", "save"), ("reached", "saved")])


if __name__ == "__main__":
    run_tests()
