"""Starts agents on the nodes of a Slurm allocation: one step a node, whose stdin and stdout carry the bytes.

A run outside an allocation makes one: salloc holds it until its command ends, and its command until our stream ends.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch_testing_ext._process import ends, interpreters
from torch_testing_ext._process.channels import socket_pair
from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext._process.logs import tail
from torch_testing_ext.runner.options import Options

from .agent_messages import ClusterError, PrepareNode
from .cluster_nodes import ClusterNodes, NodeLauncher
from .node_environment import withheld_variables
from .remote_node import JoiningNode

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
# Seconds that salloc has to give the nodes back, which it tells the controller.
SALLOC_TIMEOUT = 5.0
KILL_TIMEOUT = 2.0
# The time for a question to the controller, during which the run does nothing else.
ASK_TIMEOUT = 30.0
_OUTPUT_AT_ONCE = 1 << 16
# The environment of the allocation, between empty entries. What is printed before it is not for us.
_HOLD = "printf '\\0\\0'; env -0; printf '\\0'; exec cat >/dev/null"
# With it, salloc ends at once, and nobody gives the nodes back.
_HOLDS_NOTHING = "SALLOC_NO_SHELL"


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


# -- an allocation for one run


@dataclass
class AllocatingLauncher(NodeLauncher):
    """Waits for nodes by salloc; then `steps` makes the launcher for them, from the environment of the allocation."""

    # The command, less what it runs.
    words: Sequence[str]
    steps: Callable[[Mapping[str, str]], NodeLauncher]
    folder: Path
    environ: Mapping[str, str]
    _failure: str = ""
    _name: str = field(default_factory=lambda: f"run_test-{uuid.uuid4().hex[:12]}")
    _process: subprocess.Popen[bytes] | None = None
    _launcher: NodeLauncher | None = None
    _unread: bytes = b""

    @property
    def waits_for(self) -> str:
        if self._launcher is not None:
            return self._launcher.waits_for
        words = f"an allocation of Slurm: {shlex.join(self.words)}"
        printed = tail(self._log, lines=1)
        return f"{words} ({printed})" if printed else words

    @property
    def failure(self) -> str:
        """No allocation, or no node of it that is left: there will be no other one."""
        if self._failure or self._launcher is None:
            return self._failure
        return self._launcher.failure

    @property
    def _log(self) -> Path:
        return self.folder / "salloc.log"

    def open(self, loop: EventLoop, nodes: ClusterNodes) -> None:
        self._loop, self._nodes = loop, nodes
        command = interpreters.tethered([*self.words, f"--job-name={self._name}", "sh", "-c", _HOLD])
        environ = {name: value for name, value in self.environ.items() if name != _HOLDS_NOTHING}
        self._process, self._stream = _started(command, self._log, environ)
        loop.listen(self._stream, self._receive)

    def _receive(self) -> None:
        """Read what the allocation prints: its environment, once, and its end."""
        try:
            data = self._stream.recv(_OUTPUT_AT_ONCE)
        except ConnectionResetError:
            data = b""
        if not data:
            self._loop.forget(self._stream)
            self._see_end()
            return
        if self._launcher is not None:
            return
        self._unread += data
        _, begun, rest = self._unread.partition(b"\0\0")
        entries, ended, _ = rest.partition(b"\0\0")
        if begun and ended:
            pairs = (os.fsdecode(entry).partition("=") for entry in entries.split(b"\0"))
            self._launcher = self.steps({name: value for name, _, value in pairs})
            self._launcher.open(self._loop, self._nodes)

    def _see_end(self) -> None:
        """Nothing holds the allocation any more, if there was one: its agents end by themselves."""
        if self._launcher is not None or self._process is None:
            return
        why = tail(self._log, lines=3)
        if not why:
            why = ends.how_it_ended(self._process, KILL_TIMEOUT) or ends.describe_exit(None)
        self._failure = f"{shlex.join(self.words)} allocated nothing: {why}"

    def release(self, name: str, refused: str = "") -> None:
        if self._launcher is not None:
            self._launcher.release(name)

    def close(self, at_once: bool) -> None:
        """End the agents, and give back the nodes, or the place in the queue for them."""
        if self._launcher is not None:
            self._launcher.close(at_once)
        process, self._process = self._process, None
        if process is None:
            return
        self._loop.forget(self._stream)
        self._stream.close()
        # Before it has begun its command, it would wait for the end of that.
        by_itself = 0.0 if self._launcher is None or at_once else SALLOC_TIMEOUT
        code = -1
        try:
            code = ends.end(process, by_itself=by_itself, after_sigterm=SALLOC_TIMEOUT)
        finally:
            # Also if the user interrupts it.
            if code < 0:
                self._cancel()

    def _cancel(self) -> None:
        """salloc was killed, and has not given back what it held."""
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["scancel", "--quiet", f"--name={self._name}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=dict(self.environ),
                timeout=SALLOC_TIMEOUT,
            )


def _started(
    command: Sequence[str], log: Path, environ: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a command, with a stream for its stdin and stdout. Ctrl-C is for the runner."""
    ours, theirs = socket_pair()
    with theirs, log.open("wb") as errors:
        end = theirs.fileno()
        process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=errors, env=dict(environ), start_new_session=True
        )
    return process, ours


# Seconds that a command may take to end after its stdin.
STEP_END_TIMEOUT = 2.0


@dataclass
class CommandLauncher(NodeLauncher):
    """Starts one command for each node. What they print on stderr is kept in `folder`."""

    # The commands that start agents, by name of node.
    commands: Mapping[str, Sequence[str]]
    prepare: PrepareNode
    folder: Path
    environ: Mapping[str, str]
    # That a node gives us, where it may have more.
    cpus: Mapping[str, int] = field(default_factory=dict)
    # Accelerators that a node gives us.
    reserved: Mapping[str, int] = field(default_factory=dict)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def failure(self) -> str:
        """All nodes are there from the start: when the last has gone, none will come."""
        return "" if self._processes else "no node is left"

    def open(self, loop: EventLoop, nodes: ClusterNodes) -> None:
        for name, command in self.commands.items():
            limits = [limit for limit in (self.cpus.get(name), self.prepare.jobs) if limit is not None]
            jobs = min(limits, default=None)
            prepare = replace(self.prepare, jobs=jobs, reserved=self.reserved.get(name, 0))
            process, stream = _started(command, self._log(name), self.environ)
            self._processes[name] = process
            nodes.join(JoiningNode(name, stream, prepare, partial(self._how_it_ended, name)))

    def _log(self, name: str) -> Path:
        return self.folder / f"agent-{name}.log"

    def _how_it_ended(self, name: str) -> str:
        process = self._processes.get(name)
        if process is None:
            return "it was given back"
        how = f"its agent {ends.how_it_ended(process, STEP_END_TIMEOUT) or 'closed the connection'}"
        printed = tail(self._log(name), lines=5)
        return f"{how}: {printed}" if printed else how

    def release(self, name: str, refused: str = "") -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            _end(process)

    def close(self, at_once: bool) -> None:
        """End all commands: their agents have ended everything below them when their stdin ends."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            _end(process, 0.0 if at_once else STEP_END_TIMEOUT)


def _end(process: subprocess.Popen[bytes], timeout: float = STEP_END_TIMEOUT) -> None:
    ends.end(process, by_itself=timeout, after_sigterm=timeout)
