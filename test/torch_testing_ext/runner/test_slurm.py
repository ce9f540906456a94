"""Runs in an allocation of Slurm, with a stand-in for its commands that starts local processes."""

import os
import stat

from runs_support import RunsCase

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.cluster.slurm import cpus_of_nodes

# The task gets the name of its node; everything after the options is its command.
SRUN = """#!/bin/sh
echo "$@" >> "$SLURM_STAND_IN/steps"
echo "srun: a word on stderr" >&2
echo "Welcome to the node, as a login shell may print"
while true; do
    case "$1" in
        --nodelist=*) SLURMD_NODENAME="${1#--nodelist=}"; export SLURMD_NODENAME; shift ;;
        --*) shift ;;
        *) break ;;
    esac
done
exec "$@"
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""
SUITE = """
import os, time, unittest
class T(unittest.TestCase):
    def test_fails(self): self.fail()
    def test_0(self): time.sleep(0.5); print(os.environ["SLURMD_NODENAME"], os.path.exists("set_up"))
    def test_1(self): time.sleep(0.5); print(os.environ["SLURMD_NODENAME"], os.path.exists("set_up"))
    def test_2(self): time.sleep(0.5); print(os.environ["SLURMD_NODENAME"], os.path.exists("set_up"))
"""
RANKS = """
import os, torch.distributed as dist
from torch_testing_ext.common_distributed import MultiProcessTestCase
class Ranks(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_of_two(self):
        url = f"file://{self.file_name}"
        dist.init_process_group("gloo", init_method=url, rank=self.rank, world_size=2)
        dist.barrier()
        print(os.environ["SLURMD_NODENAME"], os.environ["GROUP_RANK"])
"""


class SlurmTest(RunsCase):
    def setUp(self):
        super().setUp()
        self.write("test/distributed/test_x.py", SUITE)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            self.write(f"bin/{name}", text)
            file = self.root / "bin" / name
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        self.slurm = {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_CPUS_PER_NODE": "3(x2)",
            "SLURM_STAND_IN": str(self.root),
        }

    def test_one_run(self):
        process = self.start(
            "--cluster=slurm", "-j1", "--results=results.json", "--cluster-setup=echo built; touch set_up",
            environ=self.slurm,
        )  # fmt: skip
        out = self.finish(process, 1)
        self.assertEqual(out.splitlines()[-1], "3 passed, 1 failed, 0 skipped")
        attempts = {test["id"].rpartition("::")[2]: test["attempts"][0] for test in self.results()["tests"]}
        for name in "test_0", "test_1", "test_2":
            self.assertEqual(attempts[name]["output"].split(), [attempts[name]["node"], "True"])
        self.assertEqual({attempt["node"] for attempt in attempts.values()}, {"node1", "node2"})
        self.assertIn("python run_test.py --cluster slurm test/distributed/test_x.py::T::test_fails", out)
        lines = (self.root / "steps").read_text().splitlines()
        steps = [line for line in lines if line.startswith("--nodes=1")]
        self.assertEqual(len(steps), 2)
        for step in steps:
            self.assertIn("--ntasks-per-node=1", step)
            self.assertIn("--cpus-per-task=3", step)

    def test_ranks_on_both_nodes(self):
        self.write("test/distributed/test_x.py", RANKS)
        process = self.start(
            "--cluster=slurm", "-j1", "--allow-multi-node", "--results=results.json", environ=self.slurm
        )
        out = self.finish(process, 0)
        self.assertEqual(out.splitlines()[-1], "1 passed, 0 failed, 0 skipped")
        (attempt,) = self.results()["tests"][0]["attempts"]
        self.assertEqual([rank["output"].split() for rank in attempt["ranks"]], [["node1", "0"], ["node2", "1"]])
        self.assertEqual(
            (attempt["node"], attempt["other_nodes"]), ("node1", [{"node": "node2", "devices": [], "slots": [0]}])
        )

    def test_refused(self):
        cases = {
            "the allocation has 2 (node1, node2)": (["--cluster-nodes=3"], {}),
            "and here is none: salloc": ([], {"SLURM_JOB_NODELIST": ""}),
            "scontrol show hostnames odd failed": ([], {"SLURM_JOB_NODELIST": "odd"}),
            "no compiler": (["--cluster-setup=echo no compiler; exit 3"], {}),
        }
        for said, (words, environ) in cases.items():
            with self.subTest(said=said):
                process = self.start("--cluster=slurm", *words, environ={**self.slurm, **environ})
                self.assertEqual(self.finish(process, 4), "")
                self.assertIn(said, self.stderr)

    def test_cpus_of_nodes(self):
        self.assertEqual(cpus_of_nodes("16(x2),8"), [16, 16, 8])
        self.assertEqual(cpus_of_nodes("4"), [4])
        self.assertEqual(cpus_of_nodes(""), [])


if __name__ == "__main__":
    run_tests()
