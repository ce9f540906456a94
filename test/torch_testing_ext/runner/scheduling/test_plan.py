"""Units, shards and priorities, as tables; the data that runs remember, on disk."""

import fcntl
import json
import multiprocessing
import tempfile
import unittest
from pathlib import Path

from kit.drawing import Drawer, seeds
from kit.invented import finished_test, make_attempt, make_test, make_unit

from torch_testing_ext._machine.device_needs import DeviceFacts, DeviceNeeds
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner import aspects_of_run
from torch_testing_ext.runner.model import FinishedTest, NodeOfRun, Policy, Summary, TestId
from torch_testing_ext.runner.options import Options, ShardSpec, Shuffle, UsageError
from torch_testing_ext.runner.scheduling.earlier_runs import Durations, LastFailed, Remembered
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.missing_results import without_result
from torch_testing_ext.runner.scheduling.plan import plan, priority
from torch_testing_ext.runner.scheduling.shards import shard

TWO = Inventory(("0", "1"), "cuda")


def nothing_known(test):
    return None


class PlanTest(unittest.TestCase):
    def test_a_test_is_a_unit_and_a_class_with_fixtures_too(self):
        tests = [
            make_test("test_a", together="Shared", world_size=2),
            make_test("test_b", devices=2),
            make_test("test_c", together="Shared", devices=1),
            make_test("test_c", file="other.py", together="Shared"),
        ]
        units = plan(tests, TWO, nothing_known).units
        self.assertEqual([[tests.index(test) for test in unit.tests] for unit in units], [[0, 2], [1], [3]])
        self.assertEqual((units[0].devices, units[0].processes), (1, 2))

    def test_tests_in_whole_worlds(self):
        tests = [
            make_test("test_a", has_ranks=True, world_size=4, devices=4),
            make_test("test_b", is_whole_world=True),
            make_test("test_c", devices=1),
            make_test("test_d", skip="not today"),
        ]
        self.assertEqual(aspects_of_run.tests_with(Options(), tests), tests)
        whole_world = Options(simulate=64)
        changed = aspects_of_run.tests_with(whole_world, tests)
        self.assertEqual([(test.world_size, test.devices) for test in changed[:2]], [(64, 0), (64, 0)])
        skips = [None, None, "not in a world of 64 ranks: it has no ranks", "not today"]
        self.assertEqual([test.skip for test in changed], skips)
        with self.assertRaisesRegex(UsageError, "--simulate 64: none of the selected tests has ranks. Name tests of"):
            aspects_of_run.tests_with(whole_world, tests[2:])
        self.assertEqual(aspects_of_run.tests_with(whole_world, []), [])

    def test_needs_that_no_devices_meet_together(self):
        facts = tuple(DeviceFacts("g", 1 << 34, (9, 0), nvlinks=(number ^ 1,)) for number in range(4))
        pairs = Inventory(("0", "1", "2", "3"), "cuda", facts=facts)
        tests = [
            make_test("test_four", together="Shared", devices=4),
            make_test("test_pair", together="Shared", devices=2, of_devices=DeviceNeeds(nvlink=True)),
            make_test("test_a", together="Other", devices=2, of_devices=DeviceNeeds(nvlink=True)),
            make_test("test_b", together="Other", devices=1),
        ]
        made = plan(tests, pairs, nothing_known)
        self.assertEqual([[tests.index(test) for test in unit.tests] for unit in made.units], [[0], [1], [2, 3]])

    def test_expected_seconds(self):
        known = {"test_a": 4.0, "test_b": 1.0}
        tests = [make_test(f"test_{name}", together="Shared" if name in "ac" else "") for name in "abcd"]
        units = plan(tests, TWO, lambda test: known.get(test.method)).units
        self.assertEqual([unit.seconds for unit in units], [8.0, 1.0, None])

    def test_more_devices_than_there_are(self):
        tests = [make_test("test_a", devices=3), make_test("test_b", devices=2), make_test("test_c", skip="known")]
        made = plan(tests, TWO, nothing_known)
        self.assertEqual([test.id.method for test in made.skipped], ["test_a", "test_c"])
        self.assertEqual(made.skipped[0].want, "3 devices")
        self.assertEqual(made.skipped[0].skip, "needs 3 devices, 2 available")
        self.assertIsNone(made.skipped[1].want)
        self.assertEqual([unit.tests[0].id.method for unit in made.units], ["test_b"])

    def test_more_devices_for_a_backend(self):
        for backend, why in (("nccl", " for the backend nccl"), ("cpu:gloo,cuda:nccl", ""), ("gloo", ""), (None, "")):
            (test,) = plan([make_test("test_a", devices=3, backend=backend)], TWO, nothing_known).skipped
            self.assertEqual((test.want, test.skip), (f"3 devices{why}", f"needs 3 devices{why}, 2 available"))

    def test_a_unit_runs_on_one_node(self):
        nodes = tuple(NodeOfRun(name, ("0", "1"), slots, 2) for name, slots in (("a", 2), ("b", 3)))
        cluster = Inventory(("a:0", "a:1", "b:0", "b:1"), "cuda", nodes=nodes)
        for needs, skip in (
            ({"devices": 2}, None),
            ({"devices": 3}, "needs 3 devices, 2 available on one node"),
            ({"world_size": 5}, None),
        ):
            (test,) = plan([make_test("test_a", **needs)], cluster, nothing_known).tests
            self.assertEqual(test.skip, skip, needs)

    def test_repetitions(self):
        made = plan([make_test("test_a"), make_test("test_b", skip="so")], TWO, nothing_known, repetitions=3)
        self.assertEqual([(unit.number, unit.repetition) for unit in made.units], [(0, 0), (1, 1), (2, 2)])
        self.assertEqual([test.id.method for test in made.tests], ["test_a", "test_b"])


class WithoutResultTest(unittest.TestCase):
    def test_every_planned_test_has_a_result(self):
        """Each repetition, and skipped tests too; unless the run ended before."""
        tests = [make_test("test_a"), make_test("test_b"), make_test("test_c", skip="so")]
        made = plan(tests, TWO, nothing_known, repetitions=2)
        every = [(unit.tests[0], unit.repetition) for unit in made.units] + [(tests[2], 0)]
        self.assertEqual(len(every), 5)
        for lost in (None, *every):
            with self.subTest(lost=lost):
                finished = tuple(
                    FinishedTest((make_attempt(test, TestOutcome.PASSED, repetition=repetition),))
                    for test, repetition in every
                    if (test, repetition) != lost
                )
                found = without_result(made, Summary(finished, 1.0))
                self.assertEqual([(one.test, one.last.repetition) for one in found], [lost] if lost else [])
                self.assertTrue(all(one.outcome is TestOutcome.ERROR for one in found))
                unfinished = (lost[0],) if lost else ()
                self.assertEqual(without_result(made, Summary(finished, 1.0, unfinished=unfinished)), ())


class ShardTest(unittest.TestCase):
    def test_every_test_is_in_one_shard(self):
        for seed in seeds(100):
            with self.subTest(seed=seed):
                draw = Drawer(seed)
                drawn = draw.several(lambda draw: (draw.one_of("abc"), draw.one_of([None, draw.number(0, 99)])), 0, 40)
                self.check_shards(drawn, draw.whole(1, 6))

    def check_shards(self, drawn, count):
        tests = [make_test(f"test_{n}", together=name.strip("a")) for n, (name, _) in enumerate(drawn)]
        known = {test.id: seconds for test, (_, seconds) in zip(tests, drawn, strict=True)}
        parts = [shard(tests, ShardSpec(index, count), known.get) for index in range(1, count + 1)]
        self.assertCountEqual([test for part in parts for test in part], tests)
        for name in "bc":
            self.assertLessEqual(sum(any(test.together == name for test in part) for part in parts), 1)

    def test_by_durations(self):
        seconds = dict(zip("abcde", [6.0, 5.0, 4.0, 3.0, 2.0], strict=True))
        tests = [make_test(f"test_{name}") for name in "abcde"]

        def part(index):
            mine = shard(tests, ShardSpec(index, 2), lambda test: seconds[test.method[-1]])
            return "".join(sorted(test.id.method[-1] for test in mine))

        self.assertEqual((part(1), part(2)), ("ade", "bc"))

    def test_empty_tests_are_distributed_too(self):
        tests = [make_test(f"test_{number}") for number in range(10)]
        self.assertEqual(len(shard(tests, ShardSpec(2, 2), lambda test: 0.0)), 5)

    def test_by_hash_if_no_durations_are_known(self):
        """A new test moves no other test to another shard."""
        tests = [make_test(f"test_{number}") for number in range(50)]
        first = shard(tests, ShardSpec(1, 2), nothing_known)
        self.assertTrue(15 < len(first) < 35, len(first))
        fewer = shard(tests[10:], ShardSpec(1, 2), nothing_known)
        self.assertEqual(set(fewer), set(first) & set(tests[10:]))

    def test_independent_of_the_order_of_tests(self):
        tests = [make_test(f"test_{number}") for number in range(20)]
        for expected in (nothing_known, lambda test: float(len(test.method))):
            self.assertEqual(
                set(shard(tests, ShardSpec(2, 3), expected)), set(shard(tests[::-1], ShardSpec(2, 3), expected))
            )


class PriorityTest(unittest.TestCase):
    def test_shuffled_by_seed(self):
        units = [make_unit(number) for number in range(20)]

        def shuffled(seed, among=units):
            key = priority(Options(shuffle=seed))
            return [unit.number for unit in sorted(among, key=key)]

        self.assertEqual(shuffled(1), shuffled(1))
        self.assertNotEqual(shuffled(1), shuffled(2))
        self.assertIsNotNone(priority(Options(shuffle=Shuffle.RANDOM))(make_unit(1, file="test_\udcff.py")))
        self.assertEqual(shuffled(1, units[5:]), [number for number in shuffled(1) if number >= 5])


class RememberedCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.folder = Path(directory.name) / "cache"
        self.warnings = []

    def durations(self):
        return Durations(self.folder, self.warnings.append)

    def last_failed(self):
        return LastFailed(self.folder, self.warnings.append)


def record_many(folder, first, count):
    """One of two runs that record at the same time."""
    for number in range(first, first + count):
        Durations(folder, print).record([finished_test(make_test(f"test_{number}"))])


class DurationsTest(RememberedCase):
    TEST = make_test("test_a")

    def test_recorded_durations_are_known_to_the_next_run(self):
        before = self.durations()
        before.record([finished_test(self.TEST, seconds=4.0)])
        self.assertIsNone(before.expected(self.TEST.id))
        self.assertEqual(self.durations().expected(self.TEST.id), 4.0)
        self.durations().record([finished_test(self.TEST, seconds=2.0)])
        self.assertEqual(self.durations().expected(self.TEST.id), 3.0)
        self.assertEqual(self.warnings, [])

    def test_failures_record_no_durations(self):
        for outcome in (TestOutcome.CRASHED, TestOutcome.TIMEOUT, TestOutcome.SKIPPED):
            self.durations().record([finished_test(self.TEST, outcome)])
        self.assertIsNone(self.durations().expected(self.TEST.id))
        self.assertFalse(self.folder.exists())

    def test_two_runs_at_once_lose_nothing(self):
        context = multiprocessing.get_context("spawn")
        runs = [context.Process(target=record_many, args=(self.folder, first, 30)) for first in (0, 100)]
        for run in runs:
            run.start()
        for run in runs:
            run.join()
            self.assertEqual(run.exitcode, 0)
        known = self.durations()
        for number in (*range(30), *range(100, 130)):
            self.assertIsNotNone(known.expected(make_test(f"test_{number}").id), number)
        self.assertEqual(
            {file.name for file in self.folder.iterdir()}, {".gitignore", "durations.json", "durations.lock"}
        )

    def test_updates_are_locked(self):
        def change(values):
            with (self.folder / "durations.lock").open() as lock, self.assertRaises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            changed.append(True)

        changed = []
        Remembered(self.folder, "durations", bool, self.warnings.append).update(change)
        self.assertEqual(changed, [True])

    def test_invalid_files_are_ignored_with_a_warning(self):
        self.durations().record([finished_test(self.TEST)])
        file = self.folder / "durations.json"
        good = json.loads(file.read_text())
        for content in (
            "",
            "{",
            "[]",
            "\x00" * 100,
            "[" * 100_000,
            json.dumps({"tests": good["tests"]}),
            json.dumps({**good, "format": "other"}),
            json.dumps({**good, "tests": {"a": "long"}}),
            json.dumps({**good, "tests": {"a": -1}}),
            json.dumps({**good, "tests": {"a": float("nan")}}),
            json.dumps({**good, "tests": [1]}),
        ):
            with self.subTest(content=content[:40]):
                file.write_text(content)
                self.warnings.clear()
                known = self.durations()
                self.assertIsNone(known.expected(self.TEST.id))
                self.assertRegex("".join(self.warnings), "durations.json is ignored: .")
                known.record([finished_test(self.TEST, seconds=2.0)])
                self.assertEqual(self.durations().expected(self.TEST.id), 2.0)

    def test_a_cache_that_cannot_be_written(self):
        self.folder.write_text("a file in the way")
        self.durations().record([finished_test(self.TEST)])
        self.assertRegex(self.warnings[-1], "durations.json was not updated: ")


class LastFailedTest(RememberedCase):
    A, B = make_test("test_a"), make_test("test_b")

    def record(self, *outcomes, policy=None, discovered=(A, B)):
        finished = tuple(finished_test(test, outcome) for test, outcome in outcomes)
        self.last_failed().record(Summary(finished, 1.0, policy or Policy()), [test.id for test in discovered])

    def failed(self):
        known = self.last_failed()
        return [test.id.method for test in (self.A, self.B) if known.failed(test.id)]

    def test_until_it_passes(self):
        self.assertEqual(self.failed(), [])
        self.record((self.A, TestOutcome.FAILED), (self.B, TestOutcome.CRASHED))
        self.assertEqual(self.failed(), ["test_a", "test_b"])
        self.record((self.A, TestOutcome.PASSED))
        self.assertEqual(self.failed(), ["test_b"])
        self.record((self.B, TestOutcome.PASSED))
        self.assertEqual(self.failed(), [])

    def test_by_the_policy(self):
        self.record((self.A, TestOutcome.LEAKED), policy=Policy(fail_leaked=True))
        self.assertEqual(self.failed(), ["test_a"])

    def test_a_broken_file_counts_as_all_its_tests(self):
        broken = make_test("", file=self.A.id.file, cls="")
        self.assertEqual(str(broken.id), self.A.id.file)
        self.record((broken, TestOutcome.ERROR), discovered=[broken])
        self.assertEqual(self.failed(), ["test_a", "test_b"])
        self.record((self.A, TestOutcome.PASSED), (self.B, TestOutcome.FAILED))
        self.assertEqual(self.failed(), ["test_b"])
        self.assertFalse(self.last_failed().failed(TestId("another.py", "A", "a")))
        self.record((broken, TestOutcome.SKIPPED), discovered=[broken])
        self.assertEqual(self.failed(), ["test_b"], "what the file has is not known")

    def test_deleted_tests_are_forgotten(self):
        self.record((self.A, TestOutcome.FAILED), (self.B, TestOutcome.FAILED))
        other = make_test("test_c", file="another.py")
        self.record((other, TestOutcome.PASSED), discovered=[other])
        self.assertEqual(self.failed(), ["test_a", "test_b"])
        self.record((self.B, TestOutcome.FAILED), discovered=[self.B])
        self.assertEqual(self.failed(), ["test_b"])


if __name__ == "__main__":
    unittest.main()
