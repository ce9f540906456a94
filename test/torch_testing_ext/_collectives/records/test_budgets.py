"""Files of budgets: what is written is read again, at any moment whole, and what cannot be read or written is told."""

import contextlib
import errno
import os
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

from torch_testing_ext._collectives.records.budgets import Budget, Budgeted, BudgetError, update
from torch_testing_ext._collectives.records.issued_calls import RankRecord
from torch_testing_ext._collectives.records.rank_facts import RankFacts
from torch_testing_ext.common_utils import run_tests

AMOUNTS = {("world", "all_reduce"): Budgeted(2, 64)}
HEAD = 'torch = "2.13"\nworld_size = 2\n'
ROW = '[[class.issued]]\ngroup = "world"\nop = "all_reduce"\ncalls = 2\nbytes = 64\n'
# What a hand has made of a file, and what is said of it.
BROKEN = {
    "": "lacks 'class'",
    HEAD: "lacks 'class'",
    "torch = ": "cannot be read",
    "class = 3": "not iterable",
    "class = [1]": "has something else than --update-budgets writes",
    "class = ['x']": "has something else than --update-budgets writes",
    f"{HEAD}[[class]]\n{ROW}": "lacks 'ranks'",
    f"{HEAD}[[class]]\nranks = 2\n{ROW}": "not iterable",
    f"{HEAD}[[class]]\nranks = ['all']\n{ROW}": "invalid literal",
    f"{HEAD}[[class]]\nranks = [0]\n{ROW.replace('2', '[]')}": "has something else than --update-budgets writes",
    f"{HEAD}[[class]]\nranks = [0]\n{ROW.replace('bytes', 'byte')}": "lacks 'bytes'",
    f"{HEAD}[[class]]\nranks = [0]\n{ROW}{ROW}": "all_reduce of group world is there twice",
    f"{HEAD}[[class]]\nranks = [0]\n[[class]]\nranks = [0]\n{ROW}": "rank 0 is in two classes",
    f"world_size = 2\n[[class]]\nranks = [0]\n{ROW}": "lacks 'torch'",
    f'torch = "2.13"\nworld_size = "two"\n[[class]]\nranks = [0]\n{ROW}': "invalid literal",
}


class BudgetsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.file = self.folder / "step.toml"

    def test_any_name_is_written_and_read(self):
        for name in (
            "world",
            'a "b"',
            "a\\b",
            "gruppe ä 组 🙂",
            "line\nbreak",
            "\x7f\t\x01",
            "[[class]]",
            "# no comment",
        ):
            with self.subTest(name):
                budget = Budget("2.13", 2, {0: {(name, "all_reduce"): Budgeted(1, 8)}, 1: {}})
                budget.write(self.file)
                self.assertEqual(Budget.read(self.file).of_ranks, budget.of_ranks)

    def test_names_of_files(self):
        for name in ("test_x[a-'b'].toml", 'say "x".toml', "ä组.toml", " spaces .toml"):
            with self.subTest(name):
                file = self.folder / name
                Budget("2.13", 2, {0: AMOUNTS}).write(file)
                self.assertEqual(Budget.read(file).of_ranks, {0: AMOUNTS})

    def test_a_broken_file(self):
        for content, said in BROKEN.items():
            with self.subTest(content):
                self.file.write_text(content)
                with self.assertRaisesRegex(BudgetError, "step.toml") as seen:
                    Budget.read(self.file)
                self.assertIn(said, str(seen.exception))
                self.assertEqual(str(seen.exception).count("step.toml"), 1)
        self.file.write_bytes(b"\xff")
        with self.assertRaisesRegex(BudgetError, "cannot be read"):
            Budget.read(self.file)

    def test_what_editors_make_of_a_file(self):
        text = Budget("2.13", 2, {0: AMOUNTS}).text()
        for name, content in (
            ("line ends", text.replace("\n", "\r\n").encode()),
            ("byte order", b"\xef\xbb\xbf" + text.encode()),
            ("comments", text.replace("\n", "  # reviewed\n").encode()),
        ):
            with self.subTest(name):
                self.file.write_bytes(content)
                self.assertEqual(Budget.read(self.file).of_ranks, {0: AMOUNTS})

    def test_a_full_disk(self):
        """The budget stays as it was, and no draft is left."""
        self.file.write_text("before")
        full = OSError(errno.ENOSPC, "No space left on device")
        with (
            mock.patch.object(os, "replace", side_effect=full),
            self.assertRaisesRegex(BudgetError, "step.toml cannot be written: .*No space left on device"),
        ):
            Budget("2.13", 2, {0: AMOUNTS}).write(self.file)
        self.assertEqual([file.name for file in self.folder.iterdir()], ["step.toml"])
        self.assertEqual(self.file.read_text(), "before")

    def test_where_nothing_can_be_written(self):
        budget = Budget("2.13", 2, {0: AMOUNTS})
        self.file.write_text("before")
        # Root may write anywhere.
        with (
            mock.patch.object(os, "access", return_value=False),
            self.assertRaisesRegex(BudgetError, "it is read-only"),
        ):
            budget.write(self.file)
        with self.assertRaisesRegex(BudgetError, "cannot be written: .*File exists"):
            budget.write(self.file / "step.toml")
        with self.assertRaisesRegex(BudgetError, "cannot be written: .*name too long"):
            budget.write(self.folder / ("x" * 300 + ".toml"))
        self.assertEqual([file.name for file in self.folder.iterdir()], ["step.toml"])
        self.assertEqual(self.file.read_text(), "before")

    def test_a_link_stays_one(self):
        link = self.folder / "link.toml"
        link.symlink_to(self.file)
        Budget("2.13", 2, {0: AMOUNTS}).write(link)
        self.assertTrue(link.is_symlink())
        self.assertEqual(Budget.read(self.file).of_ranks, {0: AMOUNTS})
        around = self.folder / "around.toml"
        around.symlink_to(around)
        with self.assertRaisesRegex(BudgetError, "around.toml cannot be read: "):
            Budget.read(around)
        Budget("2.13", 2, {0: AMOUNTS}).write(around)
        self.assertEqual(Budget.read(around).of_ranks, {0: AMOUNTS})

    def test_readers_see_whole_files(self):
        Budget("2.13", 64, dict.fromkeys(range(64), AMOUNTS)).write(self.file)
        is_over = threading.Event()
        seen = []

        def read():
            while not is_over.is_set():
                try:
                    seen.append(len(Budget.read(self.file).of_ranks))
                except BudgetError as error:
                    seen.append(str(error))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for number in range(20):
                of_ranks = {rank: {("world", "send"): Budgeted(rank, number)} for rank in range(64)}
                Budget("2.13", 64, of_ranks).write(self.file)
        finally:
            is_over.set()
            reader.join()
        self.assertEqual({*seen} - {64}, set())

    def test_what_a_run_writes_takes_the_place_of_an_earlier_one(self):
        Budget("2.13", 2, {0: AMOUNTS, 1: AMOUNTS}, ["test_x.py::test_old"]).write(self.file)
        following = self.file.stat().st_mtime_ns + 1
        issues_nothing(self.file, following, "test_x.py::test_step", rank=0)
        written = Budget.read(self.file)
        self.assertEqual((written.of_ranks, written.tests), ({0: {}}, ["test_x.py::test_step"]))

    def test_ranks_and_tests_of_one_run_add_up(self):
        for test in ("test_b", "test_a", "test_b"):
            for rank in (1, 0):
                issues_nothing(self.file, 0, test, rank)
        written = Budget.read(self.file)
        self.assertEqual((written.of_ranks, written.tests), ({0: {}, 1: {}}, ["test_a", "test_b"]))

    def test_one_run_writes_no_two_budgets_into_a_file(self):
        Budget("2.13", 2, {0: AMOUNTS}, ["test_a", "test_b"]).write(self.file)
        for test, world_size, said in (
            ("test_c", 2, ["has other traffic, of test_a and 1 other test: name a file for each"]),
            ("test_a", 2, ["has other traffic, of test_b: name a file for each"]),
            ("test_c", 4, ["has other traffic, of test_a", "one of 2 ranks, and this world has 4"]),
        ):
            with self.subTest(test, world_size=world_size):
                with self.assertRaises((AssertionError, BudgetError)) as seen:
                    issues_nothing(self.file, 0, test, 0, world_size)
                for part in said:
                    self.assertIn(part, str(seen.exception))
        self.assertEqual(Budget.read(self.file).of_ranks, {0: AMOUNTS})
        Budget("2.13", 2, {0: AMOUNTS}, ["test_a"]).write(self.file)
        with self.assertRaisesRegex(BudgetError, "has other traffic, of this test before"):
            issues_nothing(self.file, 0, "test_a", 0)

    def test_a_file_that_no_test_has_written_is_replaced(self):
        for content in (Budget("2.13", 2, {0: AMOUNTS}).text(), "torch = "):
            self.file.write_text(content)
            issues_nothing(self.file, 0, "test_a", 0)
            self.assertEqual(Budget.read(self.file).of_ranks, {0: {}})

    def test_processes_lose_nothing_of_each_other(self):
        ranks = range(8)
        children = []
        for rank in ranks:
            child = os.fork()
            if child == 0:
                code = 1
                with contextlib.suppress(BaseException):
                    issues_nothing(self.file, 0, f"test_{rank}", rank, len(ranks))
                    code = 0
                os._exit(code)
            children.append(child)
        self.assertEqual([os.waitpid(child, 0)[1] for child in children], [0 for _ in ranks])
        written = Budget.read(self.file)
        self.assertEqual({*written.of_ranks}, {*ranks})
        self.assertEqual(written.tests, sorted(f"test_{rank}" for rank in ranks))

    def test_a_folder_that_cannot_be_locked(self):
        unlockable = OSError(errno.ENOLCK, "No locks available")
        with (
            mock.patch("torch_testing_ext._collectives.records.budgets.lock", side_effect=unlockable),
            self.assertRaisesRegex(BudgetError, "step.toml cannot be written: .*No locks available"),
        ):
            issues_nothing(self.file, 0, "test_a", 0)


def issues_nothing(file, since, test, rank, world_size=2):
    """Write the budget of a rank that issues nothing."""
    update(file, since, test, world_size, "2.13", rank, RankFacts(RankRecord(rank, {}, {}, True, None)))


if __name__ == "__main__":
    run_tests()
