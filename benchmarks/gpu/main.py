"""Run every check that needs a GPU, each in a process of its own with a time limit, and write down what was seen.

    bash benchmarks/gpu/run [--quick] [--only NAME,...] [--minutes M] OUT

It takes less than nine minutes on one GPU. Checks for two GPUs or more are skipped by name on one; those that only
measure (spmd-speed) run if they are named.

OUT gets gpu.json, gpu.md (readable) and gpu.log (the output of all checks), which are up to date after every check: a
run that is cut off keeps what it has. Without a GPU, the checks that have a part for the CPU run that, and the others
are skipped by name. Exit code 0: everything holds that was checked; 1: something does not, or there was no time for
it; 4: a usage error, in one line.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MINUTES = 8.75
PROBE_LIMIT = 90.0
END_TIMEOUT = 5.0
LONGEST_TAIL = 6000
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Plan:
    """One check: a module in the folder of checks, of which only constants and the docstring are read here."""

    name: str
    path: Path
    title: str
    order: int
    limit: float
    quick_limit: float
    has_gpu_part: bool
    has_cpu_part: bool
    # How many GPUs it takes.
    gpus: int = 1
    # Only if it is named.
    is_extra: bool = False


@dataclass
class Outcome:
    """What became of a check."""

    plan: Plan
    status: str  # passed, failed, skipped, or "not run"
    why: str = ""
    part: str = "gpu"
    seconds: float = 0.0
    limit: float = 0.0
    held: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tail: str = ""


def main() -> int:
    options = read_options(sys.argv[1:])
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        log = (out / "gpu.log").open("wb", buffering=0)
    except OSError as error:
        usage(f"{out} cannot be written to: {error}")
    plans = choose(read_plans(Path(options.checks)), options.only)
    adopt_orphans()
    run = Run(options.quick, time.monotonic() + 60 * options.minutes, out, log)
    run.probe()
    if not run.facts.get("expecttest") and options.checks == str(HERE / "checks"):
        usage("expecttest is missing: carry it (pip download expecttest) and name its folder in PYTHONPATH")
    for number, plan in enumerate(plans, 1):
        run.check(plan, plans[number:])
    return run.finish()


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run", description=(__doc__ or "").splitlines()[0])
    parser.error = usage  # type: ignore[assignment]
    parser.add_argument("--quick", action="store_true", help="less of each check")
    parser.add_argument("--only", default="", metavar="NAME,...", help="only these checks")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="start nothing that would end later than this")
    parser.add_argument("--checks", default=str(HERE / "checks"), help="another folder of checks, to test this command")
    parser.add_argument("out", metavar="OUT", help="folder for gpu.json, gpu.md and gpu.log")
    return parser.parse_args(argv)


def usage(message: str) -> NoReturn:
    print(f"benchmarks/gpu/run: {message}", file=sys.stderr)
    sys.exit(4)


# -- the checks


def read_plans(folder: Path) -> list[Plan]:
    plans = [read_plan(path) for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]
    if not plans:
        usage(f"{folder} has no checks")
    return sorted(plans, key=lambda plan: (plan.order, plan.name))


def read_plan(path: Path) -> Plan:
    """What a check says about itself. It is not imported: one that cannot be must not keep the others from running."""
    name, constants, functions, title = path.stem.replace("_", "-"), dict[str, Any](), set[str](), ""
    with suppress(SyntaxError, ValueError, OSError):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        title = (ast.get_docstring(tree) or "").partition("\n")[0]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                functions.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with suppress(ValueError):
                    constants[node.targets[0].id] = ast.literal_eval(node.value)
    limit = float(constants.get("LIMIT", 60))
    quick = float(constants.get("QUICK_LIMIT", limit))
    # What cannot be read is tried: then its failure is reported.
    has_gpu_part, has_cpu_part = ("check" in functions, "on_cpu" in functions) if functions else (True, True)
    order, gpus, is_extra = (
        constants.get(key, default) for key, default in (("ORDER", 1000), ("GPUS", 1), ("EXTRA", False))
    )
    return Plan(name, path, title, int(order), limit, quick, has_gpu_part, has_cpu_part, int(gpus), bool(is_extra))


def choose(plans: list[Plan], only: str) -> list[Plan]:
    names = [name for name in only.split(",") if name]
    known = {plan.name for plan in plans}
    if unknown := [name for name in names if name not in known]:
        usage(f"{unknown[0]} is not a check; known are: {', '.join(plan.name for plan in plans)}")
    return [plan for plan in plans if plan.name in names or not (names or plan.is_extra)]


# -- the run


class Run:
    """All checks of one call of the command, and the files that say what they have found."""

    def __init__(self, quick: bool, until: float, out: Path, log: Any):
        self.quick, self.until, self.out, self.log = quick, until, out, log
        self.began, self.clock = time.monotonic(), time.time()
        self.facts: dict[str, Any] = {}
        self.outcomes: list[Outcome] = []

    def probe(self) -> None:
        """Find out what this machine has, in a process of its own: a driver may block it."""
        self.say("what this machine has")
        ended = self.run_process("probe", [str(HERE / "probe.py")], PROBE_LIMIT)
        for line in ended.lines:
            self.facts.update(line.get("facts", {}))
        if not self.facts or ended.code or ended.timed_out:
            # Otherwise a GPU that CUDA cannot use would be none, and all checks would skip.
            self.facts["trouble"] = f"the probe {ended.how}: {ended.tail.strip()[-300:]}"
        self.facts.setdefault("machine", platform.platform())
        self.write()

    @property
    def gpus(self) -> int:
        return len(self.facts.get("devices") or ())

    def why_not(self, plan: Plan) -> str:
        """Why a check cannot be made on this machine; "" if it can."""
        if not self.gpus:
            return "" if plan.has_cpu_part else "there is no GPU"
        return "" if self.gpus >= plan.gpus else f"it takes {plan.gpus} GPUs, and there is {self.gpus}"

    def check(self, plan: Plan, later: list[Plan]) -> None:
        """`later`: the checks that follow."""
        part = "gpu" if self.gpus else "cpu"
        if why := self.why_not(plan):
            outcome = Outcome(plan, "skipped", why, part)
        elif part == "gpu" and not plan.has_gpu_part:
            part, outcome = "cpu", self.measure(plan, "cpu", later)
        else:
            outcome = self.measure(plan, part, later)
        self.outcomes.append(outcome)
        self.write()
        self.say(f"{outcome.status:<8} {plan.name} ({outcome.seconds:.1f} s){': ' if outcome.why else ''}{outcome.why}")

    def limit_of(self, plan: Plan) -> float:
        return plan.quick_limit if self.quick else plan.limit

    def measure(self, plan: Plan, part: str, later: list[Plan]) -> Outcome:
        """Run a check. What the checks before it have left over of their time is shared by it and those that follow."""
        left = self.until - time.monotonic()
        own, of_later = self.limit_of(plan), sum(self.limit_of(other) for other in later if not self.why_not(other))
        limit = min(left * own / (own + of_later), 2 * own)
        if limit < min(5.0, plan.quick_limit):
            return Outcome(plan, "not run", "the time of the whole command is over", part)
        self.say(f"running  {plan.name} (at most {limit:.0f} s)")
        # A check that is killed does not remove its folder.
        with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
            words = [str(HERE / "check_process.py"), str(plan.path), part, "quick" if self.quick else "full", folder]
            ended = self.run_process(plan.name, words, limit)
        outcome = Outcome(plan, "failed", part=part, seconds=ended.seconds, limit=limit, tail=ended.tail)
        over = False
        for line in ended.lines:
            over = over or "over" in line
            add_line(outcome, line)
        decide(outcome, ended, over)
        return outcome

    def run_process(self, name: str, words: list[str], limit: float) -> Ended:
        """Run Python with these words. Its lines of JSON come through a pipe of its own, and its output to the log."""
        receive, send = os.pipe()
        self.log.write(f"\n=== {name}\n".encode())
        start = self.log.tell()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": path, "GPU_CHECK_LINES": str(send), "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-u", *words],
            pass_fds=[send],
            env=environ,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(send)
        text = b""
        pidfd = os.pidfd_open(process.pid)
        poll = select.poll()
        poll.register(receive, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        alive = True
        while alive and (left := began + limit - time.monotonic()) > 0:
            for fd, _ in poll.poll(1000 * left):
                if fd == receive:
                    text += (data := os.read(receive, 1 << 16))
                    if not data:
                        poll.unregister(receive)
                else:
                    alive = False
        timed_out = alive
        end_everything(process)
        os.set_blocking(receive, False)
        with suppress(BlockingIOError):
            while data := os.read(receive, 1 << 16):
                text += data
        os.close(receive)
        os.close(pidfd)
        self.log.seek(0, os.SEEK_END)
        lines = [json.loads(line) for line in text.split(b"\n")[:-1]]
        return Ended(lines, process.returncode, timed_out, limit, time.monotonic() - began, self.tail_from(start))

    def tail_from(self, start: int) -> str:
        with (self.out / "gpu.log").open("rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - LONGEST_TAIL))
            return log.read().decode("utf-8", "replace")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    @property
    def exit_code(self) -> int:
        return int(any(one.status in ("failed", "not run") for one in self.outcomes) or "trouble" in self.facts)

    def write(self) -> None:
        document = report.document(self)
        write_file(self.out / "gpu.json", json.dumps(document, indent=1) + "\n")
        write_file(self.out / "gpu.md", report.markdown(document))

    def finish(self) -> int:
        self.write()
        counts = report.counts(report.document(self)["checks"])
        self.say(f"{counts}; see {self.out / 'gpu.md'}")
        return self.exit_code


@dataclass(frozen=True)
class Ended:
    """How the process of a check ended, and what it has said."""

    lines: list[dict[str, Any]]
    code: int
    timed_out: bool
    limit: float
    seconds: float
    tail: str

    @property
    def how(self) -> str:
        if self.timed_out:
            return f"did not end within {self.limit:.0f} s"
        return f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with {self.code}"


def add_line(outcome: Outcome, line: dict[str, Any]) -> None:
    if "expected" in line:
        (outcome.held if line["holds"] else outcome.broken).append(line["expected"])
    if "figure" in line:
        outcome.figures.append(line["figure"])
    if "note" in line:
        outcome.notes.append(line["note"])
    if "skip" in line:
        outcome.why = line["skip"]


def decide(outcome: Outcome, ended: Ended, over: bool) -> None:
    """A check passes only if it has said that it is over, and that something holds, and that nothing is broken."""
    if outcome.broken:
        outcome.why = outcome.broken[0]
    elif ended.timed_out or ended.code or not over:
        last = next((line for line in reversed(ended.tail.splitlines()) if line.strip()), "")
        outcome.why = f"its process {ended.how}{': ' if last else ''}{last.strip()[:300]}"
    elif outcome.why:
        outcome.status = "skipped"
    elif not outcome.held:
        outcome.why = "it has checked nothing"
    else:
        outcome.status = "passed"


def write_file(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


# -- processes


def adopt_orphans() -> None:
    """Have the processes that a check leaves behind become children of this one, which ends them."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_everything(process: subprocess.Popen[bytes]) -> None:
    """End a check, and everything that it has started: children of this process now, or below one."""
    until = time.monotonic() + END_TIMEOUT
    while time.monotonic() < until:
        if process.poll() is None:
            process.kill()
        below = descendants(os.getpid())
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        reap_others(process.pid)
        if process.returncode is not None and not descendants(os.getpid()):
            return
        time.sleep(0.02)


def reap_others(kept: int) -> None:
    """Reap children that have ended, but for the one that subprocess waits for."""
    for pid in children(os.getpid()):
        if pid != kept:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    return []


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


if __name__ == "__main__":
    sys.exit(main())
