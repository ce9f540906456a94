"""Whole worlds: planted faults with ranks and lines, sound programs, facts, refusals, and the same in reality."""

import contextlib
import functools
import importlib.util
import io
import os
import random
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import world_programs as programs
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from torch_testing_ext._collectives.lanes_of_ranks import LANES_FILE
from torch_testing_ext._process import setting_names, system
from torch_testing_ext._torch.groups.dataless_groups import options_of_alike_ranks
from torch_testing_ext.common_distributed import RankError, RankFailure
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch.aspects.debugger import DEBUG_RANK
from torch_testing_ext.launch.aspects.lanes import LANES
from torch_testing_ext.launch.watching import rules
from torch_testing_ext.launch.watching.rank_lanes import read_lanes
from torch_testing_ext.ranks import spawn
from torch_testing_ext.worlds import check_world, whole_world

FILE = Path(programs.__file__)
LINES = FILE.read_text().splitlines()


def marked(function, mark="# fault"):
    """The places of the lines of a function that have a mark, as messages name them."""
    first = function.__code__.co_firstlineno
    last = max(line for *_, line in function.__code__.co_lines() if line)
    numbers = [number for number in range(first, last + 1) if LINES[number - 1].endswith(mark)]
    return [f"{FILE.name}:{number} in {function.__name__}" for number in numbers]


class WorldCase(TestCase):
    def finds(self, function, size, *texts, error=RankFailure, **options):
        with self.assertRaises(error) as caught:
            check_world(function, size, **options)
        said = f"{caught.exception}\n{caught.exception.account}"
        places = marked(function)
        self.assertTrue(places)
        for text in (*texts, *places):
            self.assertIn(text, said)


class PlantedFaultsTest(WorldCase):
    def test_a_stage_sends_in_the_wrong_order(self):
        self.finds(programs.stage_in_wrong_order, 2, "rank 0 sends [8] float32 to rank 1, which receives [2] float32")

    def test_a_stage_has_fewer_microbatches(self):
        text = "rank 2 left without receiving; rank 1 is waiting in send #4 to rank 2"
        self.finds(programs.fewer_microbatches, 4, text, "waiting for rank 2 in recv #4 from rank 2", error=RankError)

    def test_a_group_made_by_some_ranks_only(self):
        self.finds(programs.group_of_some, 4, "ranks 0, 1 make group 1 of ranks 0-2, which rank 2 has not made")

    def test_dimensions_are_swapped_on_one_node(self):
        self.finds(programs.swapped_dimensions, 8, "ranks 0, 2 make group", "which ranks 4, 6 have not made")

    def test_groups_made_in_another_order(self):
        self.finds(programs.other_order_of_groups, 4, "rank 1 makes group 4 of ranks 1, 3, which rank 3 has not made")

    def test_another_order_of_buckets(self):
        self.finds(programs.bucket_order, 4, "rank 3 calls all_reduce [32] float32 sum, ranks 0-2 call all_reduce [16]")

    def test_another_root(self):
        self.finds(programs.other_root, 4, "rank 2 calls broadcast [4] float32 root 1")

    def test_another_reduction(self):
        self.finds(programs.other_reduction, 4, "rank 1 calls all_reduce [4] float32 max")

    def test_another_type(self):
        self.finds(programs.other_type, 4, "rank 0 calls all_reduce [4] bfloat16 sum")

    def test_a_smaller_last_batch(self):
        self.finds(programs.last_batch, 4, "rank 3 calls all_gather_into_tensor [3] float32", "call #2")

    def test_splits_that_do_not_fit(self):
        self.finds(programs.uneven_experts, 4, "rank 0 sends 1 elements to rank 1, which expects 2")

    def test_a_rank_without_items(self):
        self.finds(
            programs.no_items, 4, "rank 2 left before all_reduce #1; ranks 0, 1, 3 are waiting in it", error=RankError
        )

    def test_opposite_orders_of_groups(self):
        self.finds(
            programs.opposite_groups,
            2,
            "rank 0 waits in group 1 (all_reduce #1",
            "for rank 1, which waits in group 2",
            error=RankError,
        )

    def test_hosts_that_wait_for_two_groups(self):
        self.finds(
            programs.two_groups_and_host,
            8,
            "rank 0 waits in group 1",
            "for rank 6, which waits in group 2",
            "ranks 0-5",
            error=RankError,
        )

    def test_nobody_receives(self):
        self.finds(programs.nobody_receives, 2, "nobody received rank 0's send #1 to rank 1")

    def test_a_wrong_source(self):
        self.finds(
            programs.wrong_source,
            3,
            "rank 0 waits in the default group (send #1 to rank 2",
            "for rank 2, which waits in the default group (recv #1 from rank 1",
            "for rank 1, which has left",
            error=RankError,
        )

    def test_a_barrier_on_one_rank(self):
        self.finds(
            programs.barrier_on_one_rank,
            4,
            "ranks 1-3 left before barrier #1; rank 0 is waiting in it",
            error=RankError,
        )

    def test_a_rank_with_other_layers(self):
        self.finds(
            programs.other_layers,
            4,
            "ranks 0, 2, 3 left before all_reduce #5; rank 1 is waiting in it",
            error=RankError,
        )

    def test_a_rank_that_leaves_out_a_call(self):
        self.finds(
            programs.missing_pass,
            8,
            "rank 5 left before all_reduce #3 of group mesh_tp; rank 4 is waiting in it",
            error=RankError,
        )

    def test_sends_that_are_not_buffered(self):
        text = "rank 0 waits in the default group (send #1 to rank 1"
        self.finds(programs.sends_first, 4, text, error=RankError)
        check_world(programs.sends_first, 4, buffered_sends=True)


class SoundTest(TestCase):
    @pytest.mark.slow
    def test_collectives_in_two_dimensions(self):
        world = check_world(programs.step_in_two_dimensions, 64)
        self.assertEqual(world.classes, [list(range(64))])
        self.assertEqual(world.warnings, [])

    def test_ddp(self):
        check_world(programs.ddp, 8)

    def test_fsdp(self):
        check_world(programs.fsdp, 8)

    def test_hsdp(self):
        check_world(programs.hsdp, 8)

    def test_tensor_and_sequence_parallel(self):
        check_world(programs.tensor_and_sequence, 4)

    def test_a_pipeline(self):
        for buffered in (True, False):
            world = check_world(programs.pipeline, 8, buffered_sends=buffered)
            self.assertEqual(world.classes, [[place, place + 4] for place in range(4)])

    def test_an_interleaved_pipeline(self):
        check_world(programs.interleaved, 8)

    def test_experts(self):
        check_world(programs.experts, 16)

    def test_experts_without_tokens(self):
        check_world(programs.experts_without_tokens, 3)
        check_world(programs.uneven_lists, 3)

    def test_groups_of_other_backends(self):
        self.assertEqual(check_world(programs.other_backend, 2).calls(op="all_reduce"), [2, 2])

    def test_keys_of_ranks_before(self):
        check_world(programs.asks_rank_before, 5)
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(system, "cores", lambda: 2):
            check_world(programs.asks_rank_beside, 3, Path(folder))

    def test_a_key_of_its_own_thread(self):
        check_world(programs.asks_its_thread, 2)

    def test_a_barrier_of_gloo(self):
        self.assertEqual(check_world(programs.checked_barrier, 2).calls(op="barrier"), [1, 1])


@pytest.mark.nightly
class LargeSoundTest(TestCase):
    """The same, on 64 ranks."""

    def test_data_parallel(self):
        check_world(programs.ddp, 64)

    def test_sharded(self):
        check_world(programs.fsdp, 64)
        check_world(programs.hsdp, 64)

    def test_tensor_and_sequence_parallel(self):
        check_world(programs.tensor_and_sequence, 64)

    def test_pipelines(self):
        check_world(programs.pipeline, 64)
        check_world(programs.interleaved, 64)

    def test_experts(self):
        check_world(programs.experts, 64)
        check_world(programs.experts_without_tokens, 64)


class FactsTest(TestCase):
    def warned(self, function, size):
        """The warnings of a world, which the user sees."""
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()) as shown:
            warnings.simplefilter("ignore")
            world = check_world(function, size)
        for text in world.warnings:
            self.assertIn(text, shown.getvalue())
        return world.warnings

    def test_calls_and_bytes(self):
        world = check_world(programs.step_in_two_dimensions, 8)
        self.assertEqual(world.calls(), [2] * 8)
        self.assertEqual(world.calls(group="tp"), [1] * 8)
        self.assertEqual(world.calls(group="world"), [0] * 8)
        self.assertEqual(world.bytes(group="dp", op="all_reduce"), [32] * 8)
        self.assertEqual(world.bytes(op="broadcast"), [0] * 8)
        self.assertEqual(world.longest_chain, 2)

    def test_groups_within_and_across_nodes(self):
        """Neighbours are a group of tp, so that only dp crosses nodes of two ranks."""
        world = check_world(programs.step_in_two_dimensions, 8)
        self.assertEqual(world.between_nodes(4, "tp"), [0] * 8)
        self.assertEqual(world.between_nodes(4), world.bytes("dp"))
        self.assertEqual(world.between_nodes(8, "tp"), world.bytes("tp"))
        self.assertEqual(world.between_nodes(1), [0] * 8)
        self.assertTrue(all(world.bytes("tp")))
        for nodes in (3, 0, 16):
            with self.assertRaisesRegex(ValueError, f"cannot be shared out evenly among {nodes} nodes"):
                world.between_nodes(nodes)

    def test_bytes_are_what_a_rank_hands_over(self):
        def body(rank, size):
            parts = [torch.empty(4)] * size if rank == 0 else None
            dist.scatter(torch.empty(4), parts, src=0)
            if rank < 2:
                dist.send(torch.empty(2), 1) if rank == 0 else dist.recv(torch.empty(2), 0)

        world = check_world(body, 3)
        self.assertEqual(world.bytes(op="scatter"), [48, 0, 0])
        self.assertEqual((world.bytes(op="send"), world.bytes(op="recv")), ([8, 0, 0], [0] * 3))
        self.assertEqual(len(world.classes), 3)

    def test_memory(self):
        def body(rank, size):
            kept = torch.empty(1000 * (rank + 1), dtype=torch.uint8)
            for _ in range(3):
                torch.empty(500, dtype=torch.uint8)
            kept[:10].clone()
            kept.untyped_storage().resize_(0)
            torch.empty(1200, dtype=torch.uint8)

        self.assertEqual(check_world(body, 2).memory(), [1500, 2500])

    def test_memory_of_fake_tensors(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        def body(rank, size):
            shard = torch.empty(1 << 40)
            dist.all_reduce(shard)

        with FakeTensorMode():
            world = check_world(body, 2)
        self.assertEqual(world.bytes(), [1 << 42] * 2)
        self.assertEqual(world.memory(), [1 << 42] * 2)

    def test_values_that_are_read(self):
        (line,) = self.warned(programs.reads_values, 4)
        self.assertIn("ranks 0-3: item() reads a value that other ranks have a part in", line)
        self.assertIn(marked(programs.reads_values)[0], line)

    @unittest.skipUnless(options_of_alike_ranks(), "torch has no FakeProcessGroup.Options.simulate_uniform_ranks")
    def test_values_of_alike_ranks(self):
        world = check_world(programs.waits_for_votes, 4, timeout=10)
        self.assertEqual(world.calls(), [1] * 4)
        self.assertIn(marked(programs.waits_for_votes)[0], world.warnings[0])

    def test_values_of_ranks_that_are_not_alike(self):
        """They are wrong, also where torch computes as if they were: the warning stays."""
        (line,) = self.warned(programs.sums_ranks, 3)
        self.assertIn(marked(programs.sums_ranks)[0], line)

    def test_opposite_orders_in_which_nobody_waits(self):
        (text,) = self.warned(programs.opposite_groups_at_once, 2)
        self.assertIn("issue collectives in opposite orders", text)
        self.assertIn("rank 0 issues all_reduce #1 of group 1 before all_reduce #1 of group 2", text)
        self.assertIn(marked(programs.opposite_groups_at_once)[0], text)

    def test_values_of_its_own_may_be_read(self):
        def body(rank, size):
            own = torch.ones(2)
            dist.all_reduce(torch.ones(2))
            own.sum().item()

        self.assertEqual(check_world(body, 2).warnings, [])


class LikeOtherRanksTest(WorldCase):
    """What ranks of a world have as all other ranks do."""

    def test_lanes(self):
        with tempfile.TemporaryDirectory() as folder:
            environ = {LANES.name: "1", setting_names.LOGS: folder}
            with unittest.mock.patch.dict(os.environ, environ):
                check_world(programs.step_in_two_dimensions, 4)
            (file,) = Path(folder).rglob(LANES_FILE)
            lanes = read_lanes(file)
        self.assertEqual([lane.rank for lane in lanes], [0, 1, 2, 3])
        for lane in lanes:
            self.assertEqual(len(lane.calls), 2)
            for call in lane.calls:
                self.assertLess(lane.began, call.at)
                self.assertLess(call.at, lane.ended)

    def test_warnings(self):
        def body(rank, size):
            warnings.warn(f"from rank {rank}", stacklevel=1)

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            check_world(body, 2)
        self.assertEqual({str(warning.message) for warning in seen}, {"from rank 0", "from rank 1"})

    def test_output_of_a_rank_that_fails(self):
        def body(rank, size):
            print(f"hello from rank {rank}")
            assert rank < 2

        with self.assertRaises(RankFailure) as caught:
            check_world(body, 3)
        self.assertTrue(str(caught.exception).startswith("rank 2 of 3 failed: AssertionError"))
        self.assertIn("hello from rank 2", caught.exception.account)
        self.assertNotIn("hello from rank 1", caught.exception.account)

    def test_after_a_failure_few_begin(self):
        def body(rank, size):
            assert rank > 0

        with unittest.mock.patch.object(rules, "ENOUGH_IN_TURNS", 3), self.assertRaises(RankFailure) as caught:
            check_world(body, 100)
        # Those that begin in the meantime are a few.
        (first,) = re.findall(r"ranks (\d)-99  not started", str(caught.exception))
        self.assertGreaterEqual(int(first), 3)

    @pytest.mark.slow
    def test_a_debugged_rank_has_the_streams_of_this_process(self):
        call = "check_world(world_programs.says, 3)"
        code = f"import world_programs\nfrom torch_testing_ext.worlds import check_world\n{call}"
        environ = {**os.environ, DEBUG_RANK.name: "1"}
        # Only a process of its own has streams that a rank can write to.
        command = [sys.executable, "-c", code]
        said = subprocess.run(command, env=environ, cwd=FILE.parent, capture_output=True, text=True, check=True)
        self.assertEqual(said.stdout, "rank 1 says\n")


class RefusedTest(WorldCase):
    def test_a_size_that_the_program_cannot_have(self):
        self.finds(programs.wrong_size, 4, "all 4 ranks raised ValueError: 4 ranks", error=RankError)
        self.finds(programs.own_world, 2, "makes a world of 3 ranks, and this one has 2", error=RankError)

    def test_what_reaches_out_of_the_world(self):
        for program, text in (
            (programs.starts_process, "starts a process"),
            (programs.opens_socket, "opens a socket"),
            (programs.opens_store, "opens a socket"),
            (programs.calls_nccl, "calls NCCL itself"),
            (programs.sends_datagram, "opens a socket"),
            (programs.asks_for_object, "broadcast_object_list"),
            (programs.asks_for_scattered_object, "scatter_object_list"),
        ):
            with self.subTest(program=program.__name__):
                self.finds(program, 2, text, error=RankError)

    def test_keys_that_nobody_sets(self):
        unset = "in a store, which no rank before it has set"
        with tempfile.TemporaryDirectory() as folder:
            program = functools.partial(programs.asks_nobody, file=Path(folder, "store"))
            with self.assertRaises(RankError) as caught:
                check_world(program, 3)
        self.assertIn(f"rank 1 of 3 raised NotForWorlds: the program waits for 'set' {unset}", str(caught.exception))
        self.assertIn(marked(programs.asks_nobody)[0], str(caught.exception))
        self.finds(
            programs.asks_default_store,
            2,
            f"all 2 ranks raised NotForWorlds: the program waits for 'unset' {unset}",
            error=RankError,
        )

    def test_a_rank_that_does_not_end(self):
        with self.assertRaisesRegex(RankError, "timed out after .* s; rank 1 of 2 still running(.|\n)*never_ends"):
            check_world(programs.never_ends, 2, timeout=3)

    def test_a_rank_that_is_killed(self):
        with self.assertRaisesRegex(RankError, "rank 1 of 2 was killed by SIGSEGV"):
            check_world(programs.is_killed, 2)

    def test_a_full_disk(self):
        with self.assertRaisesRegex(RankError, "all 2 ranks exited with code 10 before the test finished"):
            check_world(programs.fills_disk, 2)

    def test_what_a_rank_leaves_running(self):
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        check_world(programs.leaves_process, 2)
        os.close(write)
        self.assertEqual(os.read(read, 1), b"", "all that had the other end have ended")

    @pytest.mark.slow
    def test_a_world_that_is_killed(self):
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        body = f"world_programs.tells_and_waits, 4, {write}"
        code = f"import world_programs\nfrom torch_testing_ext.worlds import check_world\ncheck_world({body})"
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, "TMPDIR": folder}
            world = subprocess.Popen([sys.executable, "-c", code], env=environ, cwd=FILE.parent, pass_fds=[write])
            os.close(write)
            self.assertEqual(os.read(read, 1), b"!")
            self.assertEqual(len(os.listdir(folder)), 1)
            world.kill()
            world.wait()
            while os.read(read, 1):
                pass
            self.assertEqual(os.listdir(folder), [])

    def test_a_world_without_ranks(self):
        with self.assertRaisesRegex(ValueError, "at least one rank, not 0"):
            check_world(programs.ring, 0)


class SameAsInRealityTest(TestCase):
    """The ranks of `spawn` communicate."""

    def same(self, function, size):
        def real(rank):
            dist.init_process_group("gloo")
            function(rank, size)

        errors = []
        for run in (lambda: check_world(function, size), lambda: spawn(real, world_size=size, timeout=60)):
            try:
                run()
                errors.append(None)
            except (RankError, RankFailure) as error:
                errors.append(error)
        of_world, of_ranks = errors
        self.assertIs(type(of_ranks), type(of_world), of_ranks)
        return None if of_world is None else type(of_world)

    @pytest.mark.slow
    def test_sound_programs(self):
        for function, size in ((programs.ring, 3), (programs.experts_without_tokens, 4), (programs.ddp, 2)):
            self.assertIsNone(self.same(function, size), function.__name__)

    def test_a_mismatch(self):
        self.assertIs(self.same(programs.bucket_order, 4), RankFailure)

    def test_a_rank_that_leaves(self):
        self.assertIs(self.same(programs.no_items, 3), RankError)

    def test_a_cycle(self):
        self.assertIs(self.same(programs.opposite_groups, 2), RankError)


@unittest.skipUnless(importlib.util.find_spec("spmd_types"), "spmd_types is not installed")
class TypesTest(WorldCase):
    """The checker of spmd_types runs in each rank of a program that asks for it."""

    def test_a_type_that_does_not_fit(self):
        check_world(programs.typed, 4, True)
        text = "all 4 ranks raised SpmdTypeError: Partial in multiple factors of multilinear op on axis mesh_tp"
        with self.assertRaises(RankError) as caught:
            check_world(programs.typed, 4, False)
        self.assertIn(text, str(caught.exception))
        self.assertIn(marked(programs.typed)[0], str(caught.exception))


RANKS, MICROBATCHES = 2, 4


class Stage(_PipelineStageBase):
    """As much of a stage as a schedule asks for."""

    _create_grad_recv_info = _prepare_backward_infra = _prepare_forward_infra = None

    def __init__(self, number, count):
        self.submod = self.group = None
        self.stage_index, self.num_stages, self.group_size, self.group_rank = number, count, RANKS, 0


def orders():
    """The schedules of torch that its simulator knows, with their messages, and the rank of each stage."""
    for name in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"):
        kind = schedules.get_schedule_class(name)
        count = RANKS if name == "GPipe" else 2 * RANKS
        is_v = name.startswith("ZBV")
        rank_of = {stage: min(stage, count - 1 - stage) if is_v else stage % RANKS for stage in range(count)}
        local = [Stage(stage, count) for stage in rank_of if rank_of[stage] == 0]
        if name == "GPipe":
            plan = kind(local[0], MICROBATCHES)._get_pipeline_order()
            order = schedules._add_send_recv({rank: list(plan[rank]) for rank in plan}, rank_of.__getitem__, count)
        else:
            order = kind(local, MICROBATCHES).pipeline_order_with_comms
        left_out = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
        yield (
            name,
            {rank: [step for step in steps if step[1].name not in left_out] for rank, steps in order.items()},
            rank_of,
        )


def simulated(order, rank_of):
    """Does a schedule end, as torch's simulator has it?"""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            schedules._simulate_comms_compute(order, rank_of.__getitem__, len(rank_of))
    except ValueError:
        return False
    return True


def run_schedule(rank, size, order, rank_of):
    """Send and receive what a schedule says. What lacks its input is refused, as by the simulator."""
    received, computed = set(), set()
    for stage, kind, batch, *_ in order[rank]:
        step = 1 if kind.name in ("FORWARD", "SEND_F", "RECV_F") else -1
        tag = 100 * stage + 2 * batch + (step < 0)
        if kind.name.startswith("SEND"):
            assert (stage, step, batch) in computed
            dist.send(torch.ones(1), rank_of[stage + step], tag=tag)
        elif kind.name.startswith("RECV"):
            dist.recv(torch.ones(1), rank_of[stage - step], tag=tag - 100 * step)
            received.add((stage, step, batch))
        elif kind.name in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT"):
            is_remote = rank_of.get(stage - step, rank) != rank
            assert not is_remote or (stage, step, batch) in received
            computed.add((stage, step, batch))


def is_sound(order, rank_of):
    try:
        check_world(run_schedule, RANKS, order, rank_of, buffered_sends=True)
    except (RankFailure, RankError):
        return False
    return True


class SchedulesTest(TestCase):
    """Schedules of torch's pipelining, as torch's own simulator judges them."""

    def test_sound_ones(self):
        for name, order, rank_of in orders():
            self.assertTrue(simulated(order, rank_of), name)
            self.assertTrue(is_sound(order, rank_of), name)

    @pytest.mark.slow
    def test_broken_ones(self):
        numbers = random.Random(0)
        known = list(orders())
        verdicts = []
        for number in range(12):
            name, order, rank_of = known[number % len(known)]
            order = {rank: list(actions) for rank, actions in order.items()}
            actions = order[numbers.randrange(RANKS)]
            messages = [at for at, action in enumerate(actions) if action.computation_type.name[:4] in ("SEND", "RECV")]
            action = actions.pop(numbers.choice(messages))
            if number % 3:
                actions.insert(numbers.randrange(len(actions)), action)
            verdicts.append(simulated(order, rank_of))
            self.assertEqual(is_sound(order, rank_of), verdicts[-1], (name, action, order))
        self.assertGreaterEqual(verdicts.count(False), 10)


@whole_world(4)
def test_function(rank, world_size):
    dist.all_reduce(torch.ones(world_size))
    assert dist.get_world_size() == world_size == 4
    assert dist.get_rank() == rank


class DecoratorTest(TestCase):
    @whole_world(4)
    def test_method(self, rank, world_size):
        dist.all_reduce(torch.ones(world_size))
        self.assertEqual(dist.get_rank(), rank)

    def test_a_failure(self):
        @whole_world(2)
        def fails(self, rank, world_size):
            self.assertEqual(rank, 0)

        with self.assertRaisesRegex(RankFailure, "rank 1 of 2 failed: AssertionError"):
            fails(self)

    def test_a_skip(self):
        @whole_world(2)
        def skips(self, rank, world_size):
            self.skipTest("not today")

        with self.assertRaisesRegex(unittest.SkipTest, "not today"):
            skips(self)


if __name__ == "__main__":
    run_tests()
