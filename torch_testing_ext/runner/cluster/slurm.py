"""Starts agents on the nodes of a Slurm allocation: one step a node, whose stdin and stdout carry the bytes.

A run outside an allocation makes one: salloc holds it until its command ends, and its command until our stream ends.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch_testing_ext._process import interpreters
from torch_testing_ext.runner.options import Options

from .agent_messages import ClusterError, PrepareNode
from .cluster_nodes import NodeLauncher
from .node_environment import withheld_variables
from .slurm_allocation import AllocatingLauncher, CommandLauncher

SLURM = "slurm"
SLURM_PROGRAMS = ("scontrol", "srun")
# What srun reads for a step, and what is for the steps of a user, not for ours: SLURM_LABELIO puts a number before each
# line, SLURM_STDINMODE and the like take the stream away, SLURM_GPUS counts those of all nodes.
_OF_OTHER_STEPS = {
    *("SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_UNBUFFEREDIO"),
    *("SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_WORKING_DIR", "SLURM_REMOTE_CWD", "SLURM_DISTRIBUTION"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_NTASKS_PER_SOCKET", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_STEP_GRES", "SLURM_MULTI_PROG", "SLURM_CPU_BIND"),
}
_COUNTS_OF_GPUS = {"SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GRES"}
# The time for a question to the controller, during which the run does nothing else.
ASK_TIMEOUT = 30.0


def slurm_launcher(
    options: Options, root: Path, prepare: PrepareNode, folder: Path, environ: Mapping[str, str]
) -> NodeLauncher:
    """The launcher for the allocation that this process runs in; without one, it makes one. Raises ClusterError."""
    steps = partial(_steps, options, root, prepare, folder)
    if _nodes_listed(environ):
        _check_programs("")
        return steps(environ)
    _check_programs(": this is not inside a Slurm allocation", "salloc")
    return AllocatingLauncher(_salloc(options, prepare.jobs), steps, folder, environ)


def _check_programs(why: str, *more: str) -> None:
    for program in (*more, *SLURM_PROGRAMS):
        if shutil.which(program) is None:
            raise ClusterError(f"--cluster slurm needs {program}, which is not in PATH{why}")


def _nodes_listed(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""


def _salloc(options: Options, jobs: int | None) -> list[str]:
    """The command that allocates nodes: whole ones, unless the options say what is needed of each."""
    words = ["salloc", f"--nodes={options.cluster_nodes or 1}", "--ntasks-per-node=1"]
    if jobs is None:
        words += ["--exclusive", "--mem=0"]
    else:
        words.append(f"--cpus-per-task={jobs}")
    if options.cluster_gpus_per_node is not None:
        words.append(f"--gpus-per-node={options.cluster_gpus_per_node}")
    return words


def _steps(
    options: Options,
    root: Path,
    prepare: PrepareNode,
    folder: Path,
    environ: Mapping[str, str],
) -> CommandLauncher:
    """The launcher for the allocation that `environ` describes."""
    nodes = _nodes(_nodes_listed(environ))
    wanted = options.cluster_nodes or len(nodes)
    if wanted > len(nodes):
        raise ClusterError(f"--cluster-nodes {wanted}: the allocation has {len(nodes)} ({', '.join(nodes)})")
    cpus = dict(zip(nodes, cpus_of_nodes(environ.get("SLURM_JOB_CPUS_PER_NODE", "")), strict=False))
    gpus = _gpus_by_node(environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "")
    # An interpreter like this one: the nodes have the same file system.
    path = sys.path if options.drop_in else [str(root), *sys.path]
    agent = interpreters.command("runner.cluster.agent", path)
    agent = _with_set_up(agent, options.cluster_setup or "", prepare.root)
    commands = {}
    for node in nodes[:wanted]:
        commands[node] = [*_step(node, cpus.get(node), gpus.get(node)), *agent]
    left_out = _OF_OTHER_STEPS | withheld_variables(environ, options.cluster_env)
    if gpus:
        left_out |= _COUNTS_OF_GPUS
    variables = {name: value for name, value in environ.items() if name not in left_out}
    return CommandLauncher(commands, prepare, folder, variables, cpus=cpus, reserved=gpus)


def _nodes(listed: str) -> list[str]:
    """The names in Slurm's short form, such as node[01-04]."""
    done = _ask("scontrol", "show", "hostnames", listed)
    if done.returncode or not done.stdout.split():
        raise ClusterError(f"scontrol show hostnames {listed} failed: {done.stderr.strip()}")
    return done.stdout.split()


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{shlex.join(words)} has not answered for {ASK_TIMEOUT:.0f} s") from None


def cpus_of_nodes(text: str) -> list[int]:
    """The numbers of `16(x2),8`: 16, 16 and 8."""
    numbers = []
    for cpus, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        numbers += [int(cpus)] * int(times or 1)
    return numbers


def _gpus_by_node(job: str) -> dict[str, int]:
    """The number of GPUs of the allocation on each node; empty if it has none, or Slurm does not say."""
    if not job:
        return {}
    done = _ask("scontrol", "show", "job", "--details", job)
    if done.returncode:
        return {}
    by_node = {}
    for listed, count in gpus_of_nodes(done.stdout).items():
        by_node.update(dict.fromkeys(_nodes(listed), count))
    return by_node


def gpus_of_nodes(text: str) -> dict[str, int]:
    """The GPUs of each node in what scontrol tells about a job; the keys are lists of nodes in Slurm's short form."""
    counts = {}
    for nodes, resources in re.findall(r"^\s*Nodes=(\S+).* GRES=(\S+)", text, re.MULTILINE):
        numbers = re.findall(r"\bgpu(?::[^:(),]+)?:(\d+)", resources)
        count = sum(int(number) for number in numbers)
        if count:
            counts[nodes] = count
    return counts


def _step(node: str, cpus: int | None, gpus: int | None) -> list[str]:
    """The command that starts one task on a node, with all that the allocation has there.

    Not --unbuffered: the stdout of the task would be a terminal. By itself, a step has the GPUs that the allocation was
    asked for: for one task, on all nodes together (which is then an error), or none if it was asked for whole nodes.
    """
    words = ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={node}", "--overlap"]
    words += ["--cpu-bind=none", "--mpi=none", "--export=ALL"]
    if cpus is not None:
        words.append(f"--cpus-per-task={cpus}")
    if gpus is not None:
        words.append(f"--gpus={gpus}")
    return words


def _with_set_up(agent: list[str], setup: str, root: str) -> list[str]:
    """The agent after a shell command, whose output must not get into the agent's stream."""
    if not setup:
        return agent
    return ["bash", "-c", f'(cd {shlex.quote(root)} && {setup}\n) </dev/null >&2 && exec "$@"', "agent", *agent]
