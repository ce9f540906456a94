"""The actor that holds a node of Ray for us, and carries the bytes of its agent. Imports nothing of this package.

It is sent to the node by value. It ends when it is not polled any more: the bridge, or the network, is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import glob
import hashlib
import io
import os
import select
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

# Set by Ray for its workers alone. OMP_NUM_THREADS is one for each CPU of the actor; tests decide for themselves.
OF_WORKER = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
LEASE = 15.0  # seconds without a poll
START_TIMEOUT = 1800.0
CHUNK = 1 << 20
SETUP_LINES = 20
MOST_KEPT = 4  # projects on a node
STALE = 3600.0  # seconds after which a project that is still being written will never be complete


class AgentActor:
    """Starts an agent on its node, and passes bytes to it and from it."""

    def __init__(self, words: list[str], hide: list[str]):
        """`words`: the arguments of the agent's interpreter. `hide`: variables that mask accelerators."""
        threshold = os.environ.get("RAY_memory_usage_threshold")  # noqa: SIM112
        self._words = [*words, f"--ray-memory-threshold={threshold}"] if threshold else words
        self._hide = hide
        self._process: subprocess.Popen[bytes] | None = None
        self._polled = time.monotonic() + START_TIMEOUT  # the project may be large, and take a while to come
        self._raylet = int(os.environ.get("RAY_RAYLET_PID", "0"))
        self._folder = ""
        self._kept: bytes | None = None  # the project, from an earlier run
        self._lock: int | None = None
        self._log = ""
        threading.Thread(target=self._watch, daemon=True).start()

    # -- the start

    def has(self, key: str) -> bool:
        """Whether the node has kept the project with this key, from an earlier run."""
        self._kept = kept_archive(_base(), key)
        return self._kept is not None

    def start(
        self,
        archive: bytes | None,
        key: str,
        root: str,
        digest: str,
        setup: str,
        environ: dict[str, str],
        on_path: bool,
    ) -> dict[str, object]:
        """Unpack the project, run the set-up command and start the agent. Returns facts, or why it cannot start.

        `archive`: None if the node has the project with this key, or shares its folder.
        """
        self._polled = time.monotonic() + START_TIMEOUT  # a set-up may take a while
        try:
            self._make_folder()
            if archive is not None:
                keep_archive(_base(), key, archive)
            archive = self._kept if archive is None else archive
            self._kept = None
            if archive is not None:
                root = os.path.join(self._folder, "project")
                with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                    tar.extraction_filter = _as_it_is
                    tar.extractall(root)
            elif not os.path.isdir(root):
                return {"error": f"--cluster-root: there is no folder {root} there"}
            elif digest and digest_of(root) != digest:
                return {"error": f"--cluster-root: {root} has other files there than this machine's project"}
            here = self._environment(root if on_path else "", environ)
            if setup and (error := self._set_up(setup, root, here)):
                return {"error": error}
            self._start(here)
        except OSError as error:
            return {"error": str(error)}
        finally:
            self._polled = time.monotonic()
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return {"root": root, "gpus": [str(gpu) for gpu in gpus]}

    def _make_folder(self) -> None:
        """A folder of this run, which is locked. Those of runs that were killed are removed."""
        base = _base()
        for old in glob.glob(os.path.join(base, "run*")):
            fd = _lock(old)
            if fd is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(fd)
        self._folder = tempfile.mkdtemp(prefix="run", dir=base)
        self._lock = _lock(self._folder)
        self._log = os.path.join(self._folder, "agent.log")

    def _environment(self, root: str, environ: dict[str, str]) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if name not in OF_WORKER and not name.startswith("RAY_")
        }
        if not any(os.environ.get(name) for name in self._hide):
            # An actor without GPUs gets no mask from Ray: it would see all GPUs, also those of others.
            kept.update(dict.fromkeys(self._hide, "-1"))
        path = [root, *kept.get("PYTHONPATH", "").split(os.pathsep)]
        return {**kept, **environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}

    def _set_up(self, setup: str, root: str, environ: dict[str, str]) -> str:
        done = subprocess.run(
            ["bash", "-c", setup],
            cwd=root,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if done.returncode == 0:
            return ""
        said = "\n".join(done.stdout.decode(errors="replace").splitlines()[-SETUP_LINES:])
        return f"--cluster-setup exited with code {done.returncode}: {said}"

    def _start(self, environ: dict[str, str]) -> None:
        """In a thread that lives as long as this process: the kernel ends the agent when the thread ends."""
        started = threading.Event()
        errors: list[OSError] = []

        def run() -> None:
            try:
                with open(self._log, "wb") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, *self._words],
                        cwd=self._folder,
                        env=environ,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        bufsize=0,
                        start_new_session=True,
                    )
            except OSError as error:
                errors.append(error)
            started.set()
            threading.Event().wait()

        threading.Thread(target=run, daemon=True).start()
        started.wait()
        if errors:
            raise errors[0]

    # -- the bytes

    def send(self, data: bytes) -> None:
        """Pass bytes to the agent; no bytes close its stdin."""
        assert self._process is not None and self._process.stdin is not None
        try:
            if not data:
                self._process.stdin.close()
                return
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) or 0 :]
        except (OSError, ValueError):
            pass  # its end shows in `receive`

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
        """The end of the agent, in words."""
        assert self._process is not None
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return "its agent closed the connection"
        with open(self._log, errors="replace") as log:
            said = log.read()[-2000:].strip()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"its agent {how}" + (f": {said}" if said else "")

    def stop(self) -> None:
        """End the agent, and with it everything below it; then remove the folder."""
        self.send(b"")
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def pid(self) -> int:
        return os.getpid()

    # -- the watch

    def _watch(self) -> None:
        """End this process when it serves nobody: the kernel then ends the agent."""
        while True:
            time.sleep(0.5)
            orphaned = self._raylet and os.getppid() != self._raylet
            if orphaned or _is_zombie(self._raylet) or time.monotonic() - self._polled > LEASE:
                if self._process is not None:
                    self._process.kill()
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(1)


def _base() -> str:
    """The folder of this user's runs on a node, and of the projects that it has kept."""
    base = os.path.join(tempfile.gettempdir(), f"torch_testing_ext-nodes-{getpass.getuser()}")
    os.makedirs(base, mode=0o700, exist_ok=True)
    return base


def key_of(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()


def keep_archive(base: str, key: str, archive: bytes) -> None:
    """Keep a project for later runs, and forget those that were not used for longest. A full disk only prevents it."""
    with contextlib.suppress(OSError):
        fd, unfinished = tempfile.mkstemp(dir=base, prefix="unfinished")
        with open(fd, "wb") as file:
            file.write(archive)
        os.replace(unfinished, os.path.join(base, f"{key}.tar"))
    kept = sorted(glob.glob(os.path.join(base, "*.tar")), key=_last_use, reverse=True)
    stale = [name for name in glob.glob(os.path.join(base, "unfinished*")) if time.time() - _last_use(name) > STALE]
    for name in [*kept[MOST_KEPT:], *stale]:
        _remove(name)


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


def _as_it_is(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """The files are the user's own: links may lead anywhere."""
    return member


def _is_zombie(pid: int) -> bool:
    """A raylet that was killed and that no process has reaped does not end its workers."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return False


def _lock(folder: str) -> int | None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def digest_of(root: str) -> str:
    """Tells the Python files of two folders apart."""
    found = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                found.update(os.path.relpath(path, root).encode(errors="surrogateescape") + b"\0")
                with open(path, "rb") as file:
                    found.update(file.read())
    return found.hexdigest()
