"""Files that tests change on nodes: which come back, and how those of several nodes become one."""

import os
import tempfile
import unittest
from pathlib import Path

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.cluster.changes_on_node import ProjectWatch
from torch_testing_ext.runner.cluster.project_changes import ComingBack, merge_versions

LINES = b"a\nb\nc\nd\n"
FILES = {"test_x.py": LINES, "sub/data.txt": b"old", "sub/gone.txt": b"x", "other.txt": b"y", "large": b"z"}


class MergeTest(unittest.TestCase):
    def test_table(self):
        for versions, merged in (
            ([], LINES),
            ([LINES], LINES),
            ([b"A\nb\nc\nd\n", b"a\nb\nc\nD1\nD2\n"], b"A\nb\nc\nD1\nD2\n"),
            ([b"a\nB\nc\nd\n", b"a\nb\nC\nd\n"], b"a\nB\nC\nd\n"),  # lines beside each other
            ([b"A\nb\nc\nd\n", b"A\nb\nc\nd\n"], b"A\nb\nc\nd\n"),  # the same change twice
            ([b"b\nc\nd\n", b"a\nb\nc\nd\ne\n"], b"b\nc\nd\ne\n"),
            ([b"A\nb\nc\nd\n", b"X\nb\nc\nd\n"], None),
            ([b"x\na\nb\nc\nd\n", b"y\na\nb\nc\nd\n"], None),  # two texts at one place
            ([b"A\nB\nC\nd\n", b"a\nX\nc\nd\n"], None),
            ([b"a\nb\nc\nd", b"A\nb\nc\nd\n"], b"A\nb\nc\nd"),  # a last line without its end
            ([b"\xff\x00", LINES], b"\xff\x00"),
        ):
            for order in versions, versions[::-1]:
                with self.subTest(order):
                    self.assertEqual(merge_versions(LINES, order), merged)


class ProjectChangesTest(unittest.TestCase):
    """Two nodes and this machine, as three folders with the same files."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name in ("here", "a", "b"):
            self.write(name, FILES)
        self.back = ComingBack(self.folder / "here", FILES.get, {"logs": self.folder / "elsewhere"})

    def write(self, node, files):
        for name, content in files.items():
            (self.folder / node / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / node / name).write_bytes(content)

    def run_on(self, node, files, *patterns, accepts=False, remove=()):
        watch = ProjectWatch(self.folder / node, patterns, accepts)
        self.write(node, files)
        for name in remove:
            (self.folder / node / name).unlink()
        for change in watch.changes():
            self.back.add(node, change)

    def here(self, name):
        return (self.folder / "here" / name).read_bytes()

    def test_what_comes_back(self):
        os.utime(self.folder / "a" / "other.txt", (1, 1))
        new = {"sub/data.txt": b"new", "out/1": b"1", "logs/rank0": b"log", "unwanted": b"", "__pycache__/x.pyc": b""}
        self.run_on("a", {**new, "other.txt": b"y"}, "out", "logs", "*.txt", remove=["sub/gone.txt"])
        self.run_on("b", {"large": b"changed"})
        written, warnings = self.back.write()
        self.assertEqual(written, [str(self.folder / "elsewhere" / "rank0"), "out/1", "sub/data.txt"])
        self.assertEqual((self.here("sub/data.txt"), self.here("out/1"), self.here("large")), (b"new", b"1", b"z"))
        self.assertEqual((self.folder / "elsewhere" / "rank0").read_bytes(), b"log")
        (warning,) = warnings
        self.assertIn("which stay as they are here: large, sub/gone.txt; name them with cluster.fetch", warning)

    def test_accepted_on_two_nodes(self):
        self.run_on("a", {"test_x.py": b"A\nb\nc\nd\n", "new.py": b"", "expect/T.x.expect": b"e"}, accepts=True)
        self.run_on("b", {"test_x.py": b"a\nb\nc\nD\n"}, accepts=True)
        self.write("here", {"test_x.py": b"a\nb\nc\nd\nedited\n"})  # by the user, meanwhile
        self.assertEqual(self.back.write(), (["expect/T.x.expect", "test_x.py"], []))
        self.assertEqual(self.here("test_x.py"), b"A\nb\nc\nD\nedited\n")
        self.assertFalse((self.folder / "here" / "new.py").exists())

    def test_contradictions(self):
        self.run_on("a", {"test_x.py": b"A\nb\nc\nd\n", "out/1": b"1"}, "out/*", accepts=True)
        self.run_on("b", {"test_x.py": b"X\nb\nc\nd\n", "out/1": b"2"}, "out/*", accepts=True)
        written, (warning,) = self.back.write()
        self.assertEqual(written, ["out/1", "out/1@b"])
        self.assertEqual((self.here("out/1"), self.here("out/1@b")), (b"1", b"2"))
        self.assertEqual(self.here("test_x.py"), LINES)
        self.assertIn(
            "test_x.py, which tests have changed on nodes, stays as it is here: its changes on a and b", warning
        )

    def test_not_out_of_the_project(self):
        (self.folder / "here" / "link").symlink_to(self.folder)
        for name in "../x", "/x", "link/x", "":
            with self.subTest(name):
                self.assertRaises(ValueError, self.back._place, name)


if __name__ == "__main__":
    run_tests()
