"""Runs in an allocation of Slurm, with a stand-in for its commands that starts local processes."""

import os
import signal
import stat
import time

import pytest
from kit.processes import is_alive
from kit.runs import RunsCase
from kit.slurm import HANGS

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.cluster.slurm import cpus_of_nodes, gpus_of_nodes

pytestmark = pytest.mark.slow

# The task gets the name of its node; everything after the options is its command.
SRUN = """#!/bin/sh
echo "$@" >> "$SLURM_STAND_IN/steps"
echo "$$" > "$SLURM_STAND_IN/agent"
env | grep ^SLURM_ | sort > "$SLURM_STAND_IN/environ"
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
case "$*" in
    "show hostnames node[1-2]") printf 'node1\\nnode2\\n' ;;
    "show hostnames node"[12]) echo "$3" ;;
    "show job --details 7") cat "$SLURM_STAND_IN/job" ;;
    *) exit 1 ;;
esac
"""
# Holds the nodes while the file `held` is there, and waits as long as the file `busy` is. Like the real one, it gives
# them back when it gets SIGTERM or when its command ends.
SALLOC = """#!/bin/sh
cd "$SLURM_STAND_IN"
echo "$@" > asked
trap 'rm -f held; exit 1' TERM
echo "$$" > held
echo "salloc: Pending job allocation 7" >&2
while [ -e busy ]; do sleep 0.02; done
if [ -e broken ]; then echo "salloc: error: no such nodes" >&2; rm held; exit 1; fi
echo "a word of the site"
while true; do case "$1" in --*) shift ;; *) break ;; esac; done
SLURM_JOB_NODELIST="node[1-2]" SLURM_JOB_CPUS_PER_NODE="2(x2)" SLURM_JOB_ID=7 ODD="two
lines" "$@"
rm -f held
"""
JOB = """JobId=7 JobName=x
   JOB_GRES=gpu:3
     Nodes=node1 CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1)
     Nodes=node2 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0),nic:4(IDX:0-3)
   TresPerJob=gres:gpu:3
"""
SUITE = """
import os, time, unittest
class T(unittest.TestCase):
    def test_fails(self): self.fail()
    def test_0(self): time.sleep(0.5); print(os.environ["SLURMD_NODENAME"], os.path.exists("set_up"))
    def test_1(self): time.sleep(0.5); print(os.environ["SLURMD_NODENAME"], os.path.exists("set_up"))
    def test_2(self): time.sleep(0.5); print(os.environ["SLURMD_NODENAME"], os.path.exists("set_up"))
"""


class SlurmCase(RunsCase):
    def setUp(self):
        super().setUp()
        self.write("test/distributed/test_x.py", SUITE)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "salloc": SALLOC}.items():
            self.write(f"bin/{name}", text)
            file = self.root / "bin" / name
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        self.slurm = {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_CPUS_PER_NODE": "3(x2)",
            "SLURM_STAND_IN": str(self.root),
        }


class InAllocationTest(SlurmCase):
    def test_one_run(self):
        process = self.start(
            "--cluster=slurm", "-j1", "--results=results.json", "-ocluster.setup=echo built; touch set_up",
            environ=self.slurm,
        )  # fmt: skip
        out = self.finish(process, 1)
        self.assertEqual(out.splitlines()[-1], "3 passed, 1 failed, 0 skipped")
        attempts = {test["id"].rpartition("::")[2]: test["attempts"][0] for test in self.results()["tests"]}
        for name in "test_0", "test_1", "test_2":
            self.assertEqual(attempts[name]["output"].split(), [attempts[name]["node"], "True"])
        self.assertEqual({attempt["node"] for attempt in attempts.values()}, {"node1", "node2"})
        again = "--cluster slurm -o cluster.setup='echo built; touch set_up' test/distributed/test_x.py::T::test_fails"
        self.assertIn(f"run again:  python run_test.py {again}\n", out)
        lines = (self.root / "steps").read_text().splitlines()
        steps = [line for line in lines if line.startswith("--nodes=1")]
        self.assertEqual(len(steps), 2)
        for step in steps:
            self.assertIn("--ntasks-per-node=1", step)
            self.assertIn("--cpus-per-task=3", step)

    def test_steps_are_not_those_of_the_user(self):
        self.write("job", JOB)
        of_user = {
            "SLURM_JOB_ID": "7",
            "SLURM_LABELIO": "1",
            "SLURM_STDOUTMODE": "none",
            "SLURM_GPUS": "3",
            "SLURM_GPUS_PER_NODE": "3",
            "SLURM_NTASKS_PER_NODE": "4",
            "SLURM_MEM_PER_NODE": "1000",
        }
        process = self.start("--cluster=slurm", "-ocluster.setup=exit 3", environ={**self.slurm, **of_user})
        self.finish(process, 4)
        environ = (self.root / "environ").read_text()
        for name in of_user:
            (self.assertIn if name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE") else self.assertNotIn)(f"{name}=", environ)
        steps = (self.root / "steps").read_text()
        self.assertRegex(steps, r"--nodelist=node1 .*--gpus=2 ")
        self.assertRegex(steps, r"--nodelist=node2 .*--gpus=1 ")

    def test_refused(self):
        cases = {
            "the allocation has 2 (node1, node2)": (["--cluster-nodes=3"], {}),
            "scontrol show hostnames odd failed": ([], {"SLURM_JOB_NODELIST": "odd"}),
            "no compiler": (["-ocluster.setup=echo no compiler; exit 3"], {}),
            "Slurm names no accelerators": (["-ocluster.fake-gpus=true"], {}),
            "these share its folder": (["-ocluster.fetch=out"], {}),
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

    def test_gpus_of_nodes(self):
        self.assertEqual(gpus_of_nodes(JOB), {"node1": 2, "node2": 1})
        several = "  Nodes=n[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:a100:2(IDX:0-1),gpu:h100:1(IDX:2)\n"
        self.assertEqual(gpus_of_nodes(several), {"n[1-2]": 3})
        without = "  Nodes=n1 CPU_IDs=0 Mem=0 GRES=\n  Nodes=n2 CPU_IDs=0 Mem=0 GRES=nic:1(CNT:1)"
        self.assertEqual(gpus_of_nodes(without), {})


class OwnAllocationTest(SlurmCase):
    def setUp(self):
        super().setUp()
        for name in [*self.slurm]:
            if name.startswith("SLURM_JOB"):
                del self.slurm[name]

    def start_holding(self, *words):
        """A run that waits for nodes; returns when salloc has begun."""
        self.write("busy", "")
        process = self.start("--cluster=slurm", *words, environ=self.slurm)
        self.wait_until(self.is_held)
        return process

    def wait_until(self, happened):
        end = time.monotonic() + 60
        while not happened():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def is_held(self):
        return (self.root / "held").exists()

    def wait_until_given_back(self):
        self.wait_until(lambda: not self.is_held())

    def test_one_run(self):
        process = self.start(
            "--cluster=slurm", "-j1", "--cluster-nodes=2", "-ocluster.gpus-per-node=4", "--results=results.json",
            environ=self.slurm,
        )  # fmt: skip
        out = self.finish(process, 1)
        self.assertFalse(self.is_held())
        self.assertEqual(out.splitlines()[-1], "3 passed, 1 failed, 0 skipped")
        nodes = {test["attempts"][0]["node"] for test in self.results()["tests"]}
        self.assertEqual(nodes, {"node1", "node2"})
        asked = (self.root / "asked").read_text()
        wanted = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --gpus-per-node=4 --job-name=run_test-"
        self.assertTrue(asked.startswith(wanted), asked)

    def test_whole_nodes(self):
        self.write("broken", "")
        process = self.start("--cluster=slurm", environ=self.slurm)
        self.assertEqual(self.finish(process, 4), "")
        self.assertEqual(
            self.stderr,
            "run_test.py: salloc --nodes=1 --ntasks-per-node=1 --exclusive --mem=0 allocated nothing: "
            "salloc: Pending job allocation 7\nsalloc: error: no such nodes\n",
        )

    def test_no_nodes_in_time(self):
        process = self.start_holding("-ocluster.timeout=1")
        self.assertEqual(self.finish(process, 4), "")
        self.assertFalse(self.is_held())
        self.assertIn("no run after 1 s of waiting: an allocation of Slurm: salloc --nodes=1", self.stderr)
        self.assertIn("(salloc: Pending job allocation 7)", self.stderr)

    def test_signals_while_it_waits(self):
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGKILL:
            with self.subTest(signal=number):
                process = self.start_holding()
                process.send_signal(number)
                process.wait()
                self.wait_until_given_back()

    def test_signals_while_it_runs(self):
        self.write("test/distributed/test_x.py", HANGS)
        for numbers in (signal.SIGINT, signal.SIGINT), (signal.SIGKILL,):
            with self.subTest(signals=numbers):
                fifo = self.root / "began"
                fifo.unlink(missing_ok=True)
                os.mkfifo(fifo)
                process = self.start("--cluster=slurm", "-j1", "--cluster-nodes=1", environ=self.slurm)
                self.wait_for_writer("began", process)
                self.assertTrue(self.is_held())
                pids = [int(pid) for pid in (self.root / "pids").read_text().split()]
                for number in numbers:
                    process.send_signal(number)
                process.wait()
                self.wait_until_given_back()
                self.wait_until(lambda gone=pids: not any(map(is_alive, gone)))

    def test_allocation_ends(self):
        """As by scancel: what runs there is ended, and the run does not wait for other nodes."""
        self.write("test/distributed/test_x.py", HANGS)
        os.mkfifo(self.root / "began")
        process = self.start("--cluster=slurm", "-j1", "--cluster-nodes=1", environ=self.slurm)
        self.wait_for_writer("began", process)
        os.kill(int((self.root / "agent").read_text()), signal.SIGTERM)
        out = self.finish(process, 1)
        self.assertEqual(out.splitlines()[-1], "0 passed, 1 failed, 0 skipped")
        self.assertIn("no node is left: node node1 was lost: its agent was killed by SIGTERM", out)
        self.assertFalse(self.is_held())

    def test_nothing_to_allocate_with(self):
        for program in "salloc", "srun":
            with self.subTest(program=program):
                (self.root / "bin" / program).unlink()
                environ = {**self.slurm, "PATH": str(self.root / "bin")}
                process = self.start("--cluster=slurm", environ=environ)
                self.assertEqual(self.finish(process, 4), "")
                self.assertEqual(
                    self.stderr,
                    f"run_test.py: --cluster slurm needs {program}, which is not in PATH: "
                    "this is not inside a Slurm allocation\n",
                )
                self.write("bin/salloc", SALLOC)
                (self.root / "bin/salloc").chmod(0o755)


if __name__ == "__main__":
    run_tests()
