"""Starts agents on the nodes of a Slurm allocation: one step a node, whose stdin and stdout carry the bytes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from torch_testing_ext._process import interpreter

from ..options.options import Options
from .commands import CommandLauncher
from .place import ClusterError
from .protocol import PrepareNode

SLURM = "slurm"
IN_ALLOCATION = "salloc --nodes=2 python run_test.py --cluster slurm"


def slurm_launcher(
    options: Options, root: Path, prepare: PrepareNode, folder: Path, environ: Mapping[str, str]
) -> CommandLauncher:
    """The launcher for the allocation that this process runs in. Raises ClusterError if there is none."""
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not listed:
        raise ClusterError(f"--cluster slurm runs in an allocation of Slurm, and here is none: {IN_ALLOCATION}")
    for program in "scontrol", "srun":
        if shutil.which(program) is None:
            raise ClusterError(f"--cluster slurm needs {program}, which is not in PATH")
    nodes = _nodes(listed)
    wanted = options.cluster_nodes or len(nodes)
    if wanted > len(nodes):
        raise ClusterError(f"--cluster-nodes {wanted}: the allocation has {len(nodes)} ({', '.join(nodes)})")
    cpus = dict(zip(nodes, cpus_of_nodes(environ.get("SLURM_JOB_CPUS_PER_NODE", "")), strict=False))
    agent = _with_set_up(_agent(root, prepare.drop_in), options.cluster_setup or "", prepare.root)
    return CommandLauncher(
        {node: [*_step(node, cpus.get(node)), *agent] for node in nodes[:wanted]}, prepare, folder, environ
    )


def _nodes(listed: str) -> list[str]:
    """The names in Slurm's short form, such as node[01-04]."""
    done = subprocess.run(
        ["scontrol", "show", "hostnames", listed], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode or not done.stdout.split():
        raise ClusterError(f"scontrol show hostnames {listed} failed: {done.stderr.strip()}")
    return done.stdout.split()


def cpus_of_nodes(text: str) -> list[int]:
    """The numbers of `16(x2),8`: 16, 16 and 8."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(cpus) for cpus, times in found for _ in range(int(times or 1))]


def _step(node: str, cpus: int | None) -> list[str]:
    """The command that starts one task on a node, with all that the allocation has there."""
    words = ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={node}", "--overlap"]
    words += ["--unbuffered", "--cpu-bind=none"]
    return words if cpus is None else [*words, f"--cpus-per-task={cpus}"]


def _agent(root: Path, drop_in: bool) -> list[str]:
    """An interpreter like this one: the nodes have the same file system."""
    return interpreter.command("runner.agent", sys.path if drop_in else [str(root), *sys.path])


def _with_set_up(agent: list[str], setup: str, root: str) -> list[str]:
    """The agent after a shell command, whose output must not get into the agent's stream."""
    if not setup:
        return agent
    return ["bash", "-c", f'(cd {shlex.quote(root)} && {setup}\n) </dev/null >&2 && exec "$@"', "agent", *agent]
