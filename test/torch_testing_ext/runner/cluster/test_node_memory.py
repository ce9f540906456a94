"""A node whose memory is nearly used up: real tests and a real agent, which reads the use of memory from a folder."""

import os
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

from kit.agents import Nodes

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.cluster.node_memory import MOST_SHARE, most_share

# A test says itself what the system's files show. In its second attempt the fat one does nothing.
TESTS = """
import os, time, unittest
def use(share):
    with open({current!r} + ".new", "w") as file:
        file.write(str(int(share * {limit})))
    os.rename({current!r} + ".new", {current!r})
class Fat(unittest.TestCase):
    def test_fat(self):
        if os.path.exists({marker!r}):
            return
        open({marker!r}, "w").close()
        memory = b"x" * (300 << 20)
        if {crowded}:
            alive = open({fifo!r}, "w")
        use(0.95)
        time.sleep(1000)
class Lean(unittest.TestCase):
    @unittest.skipUnless({crowded}, "nothing runs beside the other")
    def test_lean(self):
        with open({fifo!r}) as alive:
            alive.read()
        use(0.1)
"""
AGENT = """
import sys
from pathlib import Path
from torch_testing_ext._machine.machine_memory import MachineMemory
from torch_testing_ext._process import sessions
from torch_testing_ext.runner.cluster import agent
sessions.exit_now(agent.serve(MachineMemory(Path(sys.argv[1]))))
"""
LIMIT = 2 << 30


class TestNodeMemory(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = Path(tempfile.mkdtemp(prefix="torch_testing_ext_test_"))
        cls.addClassCleanup(shutil.rmtree, folder)
        cls.current, cls.marker, cls.fifo = folder / "sys/fs/cgroup/memory.current", folder / "marker", folder / "fifo"
        os.mkfifo(cls.fifo)
        for path in folder / "proc/self", cls.current.parent:
            path.mkdir(parents=True)
        (folder / "proc/self/cgroup").write_text("0::/\n")
        cls.current.with_name("memory.max").write_text(str(LIMIT))
        cls.nodes = Nodes("a", command=(sys.executable, "-c", AGENT, str(folder)))
        cls.nodes.__enter__()
        cls.addClassCleanup(cls.nodes.__exit__)

    def setUp(self):
        self.current.write_text(str(LIMIT // 10))
        self.marker.unlink(missing_ok=True)

    def open_fifo(self, warning):
        if "of memory" in warning:
            with open(self.fifo, "w"):
                pass

    def run_tests_with(self, crowded, source=TESTS, on_warning=lambda text: None):
        paths = {"current": self.current, "marker": self.marker, "fifo": self.fifo}
        text = source.format(limit=LIMIT, crowded=crowded, **{name: str(path) for name, path in paths.items()})
        self.said = []
        self.nodes.place.nodes.troubles.show = lambda warning: (self.said.append(warning), on_warning(warning))
        run = self.nodes.run(self.nodes.write(text))
        self.assertTrue(self.nodes.is_free)
        return {one.test.id.dotted.rpartition(".")[2]: one for one in run.summary.finished}

    def test_the_fattest_unit_is_ended(self):
        """It runs again, once, while no other runs."""
        found = self.run_tests_with(crowded=True)
        self.assertEqual(found["test_lean"].outcome.value, "passed")
        fat = found["test_fat"]
        self.assertEqual([attempt.outcome.value for attempt in fat.attempts], ["crashed", "passed"])
        size = r"\d{3} MiB"
        self.assertRegex(
            fat.attempts[0].said,
            r"it was terminated [\d.]+ s into Fat.test_fat: the node was at 95 % of its 2.0 GiB of memory; "
            f"of the 2 units there, this one used most: {size}",
        )
        self.assertNotIn("node a was lost", "\n".join(self.said))

    def test_a_unit_alone_is_not_run_again(self):
        found = self.run_tests_with(crowded=False)
        (attempt,) = found["test_fat"].attempts
        self.assertEqual(attempt.outcome.value, "crashed")
        self.assertRegex(attempt.said, r"at 95 % of its 2.0 GiB of memory; this unit used: \d{3} MiB")

    def test_others_have_the_memory(self):
        """Nothing that ends here would help: the tests go on, and a warning says so, once."""
        source = """
import unittest
class T(unittest.TestCase):
    def test_small(self):
        with open({current!r}, "w") as file:
            file.write(str(int(0.95 * {limit})))
        open({fifo!r}).close()
"""
        found = self.run_tests_with(crowded=False, source=source, on_warning=self.open_fifo)
        self.assertEqual(found["test_small"].outcome.value, "passed")
        said = [text for text in self.said if "of memory" in text]
        self.assertEqual(len(said), 1)
        self.assertRegex(said[0], r"node a: it is at 95 % of its 2.0 GiB of memory, of which tests use [\d.]+ MiB")

    def test_below_the_limit_of_ray(self):
        self.assertEqual(most_share(), MOST_SHARE)
        self.assertEqual(most_share("odd"), MOST_SHARE)
        self.assertEqual(most_share("0.99"), MOST_SHARE)
        self.assertAlmostEqual(most_share("0.7"), 0.65)
        self.assertEqual(most_share("0"), 0.0)


if __name__ == "__main__":
    run_tests()
