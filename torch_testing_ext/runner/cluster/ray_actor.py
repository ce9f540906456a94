"""The actor that holds a node of Ray for us, and carries the bytes of its agent.

It is sent to the node by value, with the module of private folders: before the set-up, the node may not have this
package. It ends when it is not polled any more: the bridge, or the network, is gone. Below it is the supervisor
(node_supervisor.py), which ends the agent and all else that runs on the node.
"""

import contextlib
import getpass
import glob
import hashlib
import io
import json
import os
import select
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from torch_testing_ext._process.private_folders import UnsafeFolder, make_locked, make_private, remove_left

# Variables that Ray sets for its workers alone. OMP_NUM_THREADS is one for each CPU of the actor; tests decide for
# themselves.
OF_WORKER = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
# Seconds without a poll.
LEASE = 15.0
START_TIMEOUT = 1800.0
AGENT_END_TIMEOUT = 2.0
CHUNK = 1 << 20
# Projects on a node.
MOST_KEPT = 4
# Seconds after which a project that no run has used is removed.
EXPIRY = 7 * 86400.0
# Seconds after which a project that is still being written will never be complete.
STALE_PROJECT_AGE = 3600.0
BASE = "torch_testing_ext-nodes-"
RUN = "run"
# The folder's prefix if the shared place has none that can be used.
RUN_ELSEWHERE = "torch_testing_ext_run_"


class AgentActor:
    """Starts an agent on its node, and passes bytes to it and from it."""

    def __init__(self, supervisor: str, words: list[str], hide: list[str]):
        """`supervisor`: its source. `words`: of the agent's interpreter. `hide`: variables that mask accelerators."""
        threshold = os.environ.get("RAY_memory_usage_threshold")  # noqa: SIM112
        self._supervisor = supervisor
        self._words = [*words, f"--ray-memory-threshold={threshold}"] if threshold else words
        self._hide = hide
        self._base, self._warnings = _base()
        # The supervisor.
        self._process: subprocess.Popen[bytes] | None = None
        # The project may be large, and take a while to come.
        self._polled = time.monotonic() + START_TIMEOUT
        self._raylet = int(os.environ.get("RAY_RAYLET_PID", "0"))
        # The project, from an earlier run.
        self._kept: bytes | None = None
        # The log of the agent; it can be read when its folder has gone.
        self._log: io.BufferedRandom | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    # -- the start

    def has(self, key: str) -> bool:
        """Whether the node has kept the project with this key, from an earlier run."""
        if not self._base:
            return False
        self._kept = kept_archive(self._base, key)
        forget_archives(self._base, MOST_KEPT, EXPIRY)
        return self._kept is not None

    def start(
        self,
        archive: bytes | None,
        key: str,
        root: str,
        digest: str,
        setup: str,
        environ: dict[str, str],
        path: list[str],
        times: dict[str, int],
    ) -> dict[str, object]:
        """Unpack the project, run the set-up command and start the agent. Returns facts, or why it cannot start.

        `archive`: None if the node has the project with this key, or shares its folder.
        """
        # A set-up may take a while.
        self._polled = time.monotonic() + START_TIMEOUT
        folder = ""
        try:
            folder = self._start_supervisor()
            if archive is not None and self._base:
                keep_archive(self._base, key, archive)
            archive = self._kept if archive is None else archive
            self._kept = None
            if archive is not None:
                root = os.path.join(folder, "project")
                _unpack(archive, root, times)
            elif not os.path.isdir(root):
                return self._failed(f"cluster.root: there is no folder {root} there")
            elif digest and digest_of(root) != digest:
                return self._failed(f"cluster.root: {root} has other files there than this machine's project")
            folders = [os.path.normpath(os.path.join(root, name)) for name in path]
            environ = self._environment(folders, environ)
            error = self._start(folder, {"root": root, "setup": setup, "environ": environ})
            if error:
                return {"error": error}
        except OSError as error:
            return self._failed(f"{error.strerror}: {error.filename or folder or self._base}")
        finally:
            self._polled = time.monotonic()
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return {"root": root, "gpus": [str(gpu) for gpu in gpus], "warnings": self._warnings}

    def _failed(self, error: str) -> dict[str, object]:
        """Without a job, the supervisor removes its folder and ends."""
        self.send(b"")
        return {"error": error}

    def _environment(self, path: list[str], environ: dict[str, str]) -> dict[str, str]:
        kept = {}
        for name, value in os.environ.items():
            if name not in OF_WORKER and not name.startswith("RAY_"):
                kept[name] = value
        if not any(os.environ.get(name) for name in self._hide):
            # An actor without GPUs gets no mask from Ray: it would see all GPUs, also those of others.
            kept.update(dict.fromkeys(self._hide, "-1"))
        folders = [*path, *kept.get("PYTHONPATH", "").split(os.pathsep)]
        whole_path = os.pathsep.join(folder for folder in folders if folder)
        return {**kept, **environ, "PYTHONPATH": whole_path}

    def _start(self, folder: str, job: Mapping[str, object]) -> str:
        """Have the supervisor run the set-up and start the agent. Returns why that failed."""
        process = self._process
        assert process is not None and process.stdout is not None
        log = os.path.join(folder, "agent.log")
        self._log = open(log, "w+b")  # noqa: SIM115
        words = [sys.executable, *self._words, f"--folder={folder}"]
        self.send(json.dumps({**job, "log": log, "words": words}).encode() + b"\n")
        # No more than that: it has no buffer.
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            return "it was ended while it started"
        return str(json.loads(line)["error"])

    def _start_supervisor(self) -> str:
        """Create the folder of this run, and start its supervisor. Returns the folder.

        In a thread that lives as long as this process: the kernel ends the supervisor when the thread ends.
        """
        folder, lock = make_locked(RUN if self._base else RUN_ELSEWHERE, self._base or None)
        started = threading.Event()
        errors: list[OSError] = []

        def run() -> None:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", self._supervisor, str(os.getpid()), str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=[lock],
                    start_new_session=True,
                )
            except OSError as error:
                errors.append(error)
            started.set()
            threading.Event().wait()

        threading.Thread(target=run, daemon=True).start()
        started.wait()
        # The supervisor has it.
        os.close(lock)
        if errors:
            raise errors[0]
        return str(folder)

    # -- the bytes

    def send(self, data: bytes) -> None:
        """Pass bytes to the agent; no bytes close its stdin."""
        if self._process is None or self._process.stdin is None:
            return
        try:
            if not data:
                self._process.stdin.close()
                return
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) or 0 :]
        except (OSError, ValueError):
            # Its end shows in `receive`.
            pass

    def receive(self, timeout: float) -> bytes | None:
        """The new output of the agent, after at most `timeout` seconds; None after its end."""
        assert self._process is not None and self._process.stdout is not None
        self._polled = time.monotonic() + timeout
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return b""
        self._polled = time.monotonic()
        return os.read(self._process.stdout.fileno(), CHUNK) or None

    def keep(self) -> None:
        """The agent is still needed, but what it says cannot be passed on at the moment."""
        self._polled = time.monotonic()

    def how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(AGENT_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "its agent closed the connection"
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        printed = ""
        if self._log is not None:
            printed = self._log.read()[-2000:].decode(errors="replace").strip()
        return f"its agent {how}: {printed}" if printed else f"its agent {how}"

    def stop(self) -> None:
        """End the agent, and with it everything below it, and remove the folder."""
        self.send(b"")
        self._end_supervisor(AGENT_END_TIMEOUT)

    def _end_supervisor(self, by_itself: float) -> None:
        """SIGKILL would end the supervisor alone: it is for one that does not answer."""
        process = self._process
        if process is None:
            return
        for seconds, end in ((by_itself, process.terminate), (AGENT_END_TIMEOUT, process.kill)):
            try:
                process.wait(seconds)
                return
            except subprocess.TimeoutExpired:
                end()

    def pid(self) -> int:
        return os.getpid()

    # -- the watch

    def _watch(self) -> None:
        """End this process when it serves nobody, and with it the supervisor."""
        while True:
            time.sleep(0.5)
            is_orphaned = bool(self._raylet) and os.getppid() != self._raylet
            is_forgotten = time.monotonic() - self._polled > LEASE
            if is_orphaned or is_forgotten or _is_zombie(self._raylet):
                self._end_supervisor(0.0)
                os._exit(1)


def _base() -> tuple[str, list[str]]:
    """The folder of this user's runs on a node, and of the projects that it has kept; else none, and a warning."""
    try:
        user = getpass.getuser().replace(os.sep, "_")
    except (KeyError, OSError):
        # A container may not know its user.
        user = str(os.getuid())
    wanted = Path(tempfile.gettempdir(), BASE + user)
    try:
        return str(make_private(wanted)), []
    except (OSError, UnsafeFolder) as error:
        return "", [f"{error}: the project is unpacked in another folder, and not kept there"]


def _unpack(archive: bytes, root: str, times: Mapping[str, int]) -> None:
    os.makedirs(root)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # The files are the user's own: links may lead anywhere.
        tar.extraction_filter = lambda member, path: member
        tar.extractall(root)
    for name, moment in times.items():
        # It was gone when the project was packed.
        with contextlib.suppress(OSError):
            os.utime(os.path.join(root, name), ns=(moment, moment), follow_symlinks=False)


def clean() -> list[str]:
    """Remove what this node has kept, and folders of runs that were killed. Returns the paths."""
    base, _ = _base()
    removed = []
    if base:
        removed += forget_archives(base, 0)
        removed += map(str, remove_left(Path(base), RUN))
    removed += map(str, remove_left(Path(tempfile.gettempdir()), RUN_ELSEWHERE))
    return removed


def key_of(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()


def keep_archive(base: str, key: str, archive: bytes) -> None:
    """Keep a project for later runs, and forget those that were not used for longest. A full disk only prevents it."""
    with contextlib.suppress(OSError):
        fd, unfinished = tempfile.mkstemp(dir=base, prefix="unfinished")
        with open(fd, "wb") as file:
            file.write(archive)
        os.replace(unfinished, os.path.join(base, f"{key}.tar"))
    forget_archives(base, MOST_KEPT)


def forget_archives(base: str, most: int, seconds: float = float("inf")) -> list[str]:
    """Remove kept projects beyond a number, and those that no run has used for so long. Returns their paths."""
    now = time.time()
    kept = sorted(glob.glob(os.path.join(base, "*.tar")), key=_last_use, reverse=True)
    forgotten = kept[most:]
    for path in kept[:most]:
        if now - _last_use(path) > seconds:
            forgotten.append(path)
    for path in glob.glob(os.path.join(base, "unfinished*")):
        if now - _last_use(path) > STALE_PROJECT_AGE:
            forgotten.append(path)
    for path in forgotten:
        _remove(path)
    return forgotten


def kept_archive(base: str, key: str) -> bytes | None:
    """The project with this key, if it is here and still the same."""
    path = os.path.join(base, f"{key}.tar")
    try:
        with open(path, "rb") as file:
            archive = file.read()
        os.utime(path)
    except OSError:
        return None
    if key_of(archive) == key:
        return archive
    _remove(path)
    return None


def _last_use(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _is_zombie(pid: int) -> bool:
    """A raylet that was killed and that no process has reaped does not end its workers."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return False


def digest_of(root: str) -> str:
    """Tells the Python files of two folders apart."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            if not name.endswith(".py"):
                continue
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, root)
            digest.update(relative.encode(errors="surrogateescape") + b"\0")
            with open(path, "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()
