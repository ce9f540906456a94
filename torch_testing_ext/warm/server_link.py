"""The address of a client's server, and the messages between them; imports little."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import resource
import socket
import sys

from torch_testing_ext import __version__
from torch_testing_ext._process.private_folders import UnsafeFolder, make_private

# --------------------------------------------------------------------------------------------------------------------
# The messages between a client, the stages and the supervisor of a program: one JSON object each, with file
# descriptors.
#
# A client asks the server, and gets an answer. If it is `ProgramReady`, the program's supervisor goes on with the
# connection.

# Importing typing takes a tenth of the client's time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**options):
        return lambda kind: kind


KIND = socket.SOCK_SEQPACKET
_LARGEST = 1 << 20
# Linux sends no more descriptors in a message.
_MOST_DESCRIPTORS = 253
_DESCRIPTOR = array.array("i").itemsize

_KINDS: dict[str, type[Message]] = {}


@dataclass_transform(frozen_default=True, eq_default=False)
class Message:
    """A record, whose fields are the annotations of its class. To a type checker, its class is a dataclass.

    Importing the module `dataclasses` takes 6 ms, for which a client would wait.
    """

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def __init__(self, *values: Any, **named: Any) -> None:
        kind = type(self)
        names = [*kind.__annotations__]
        fields = {**dict(zip(names, values, strict=False)), **named}
        missing = [name for name in names if name not in fields and not hasattr(kind, name)]
        if missing or len(fields) < len(values) + len(named) or not fields.keys() <= {*names}:
            raise TypeError(f"{kind.__name__} has the fields {', '.join(names)}")
        vars(self).update(fields)


# -- a client asks


class AskStatus(Message):
    """The server is to say how it is: `ServerStatus`."""


class StopServer(Message):
    """The server is to end: `ServerStopped`."""


class RunProgram(Message):
    """The server is to run a program. With it come descriptors: the client, the working directory, the program's."""

    # "file", "-m" or "-c".
    kind: str
    # The file, module or code first.
    words: list[str]
    environ: dict[str, str]
    umask: int
    # Signals.
    ignored: list[int]
    blocked: list[int]
    # What the program's descriptors are to be called.
    numbers: list[int]
    # Whether the program leads its process group.
    leads: bool
    # Whether what the program leaves running is killed.
    adopts: bool


# -- the server answers


class ServerStatus(Message):
    """The counts of a server: the programs that it has run, and its processes."""

    pid: int
    runs: int
    processes: int


class ServerStopped(Message):
    """The server ends."""

    pid: int


class Stale(Message):
    """The process that was asked has read files that have changed, and ends."""


class RunCold(Message):
    """The client has to run the program by itself. The reason is empty if that is as it should be."""

    why: str


# -- a stage asks one below it, which answers; the server is the stage at the top


class ForkProgram(Message):
    """The stage is to have the program run. The descriptors of `RunProgram` come with it."""

    program: RunProgram
    # The variables, as the program has them when it imports the modules of the stages.
    seen_by_imports: dict[str, str]


class StageBuilt(Message):
    """A new stage has imported its modules."""

    # Why no program may be forked from it.
    fault: str | None
    # A file that it has read, and that may have changed since then.
    young: str | None


class Taken(Message):
    """A process has been forked for the program."""


class OtherVariables(Message):
    """The imports of the stage have read variables that are others in the program."""


StageAnswer = Taken | OtherVariables | Stale | RunCold


# -- a supervisor and its client


class ProgramReady(Message):
    """The program can begin."""


class BeginProgram(Message):
    """The program is to begin."""


class ProgramBegun(Message):
    """The program has a process."""


class ProgramStopped(Message):
    """A signal has stopped the program."""


class ProgramEnded(Message):
    """The program has no process any more."""

    # As waitpid() gives it.
    status: int


class SendSignal(Message):
    """The supervisor is to send the program a signal."""

    number: int
    to_group: bool = False


# -- a program tells the server


class StartedAgain(Message):
    """A program has to start again in a new interpreter, since its modules are not those of the stages."""

    # Equal for runs of the same program.
    program: str
    why: str
    # The variables that it has set, and that the imports of the stages read.
    environ: dict[str, str | None]
    # The entries of its sys.path that hide modules of the stages.
    folders: list[str]


# -- as bytes


def encode(message: Message) -> bytes:
    return json.dumps(message, default=_plain).encode()


def _plain(message: Message) -> dict[str, Any]:
    return {type(message).__name__: vars(message)}


def decode(data: bytes) -> Message:
    """The message in these bytes. Raises ValueError if they are none."""
    try:
        return _decoded(json.loads(data))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a message: {error}") from None


def _decoded(data: dict[str, dict[str, Any]]) -> Message:
    ((name, fields),) = data.items()
    kind = _KINDS[name]
    for field, annotation in kind.__annotations__.items():
        if annotation in _KINDS:
            fields[field] = _decoded(fields[field])
    return kind(**fields)


def send(sock: socket.socket, message: Message, fds: Iterable[int] = ()) -> None:
    """Send a message. Raises OSError if it is too large for the system, or the other end is gone."""
    # Not socket.send_fds: a file of the user's may have hidden the `array` that it needs; so for recv_fds.
    sock.sendmsg([encode(message)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    """Wait for a message. Raises EOFError when the other end is gone, ValueError if it is no message."""
    try:
        data, ancillary, _, _ = sock.recvmsg(_LARGEST, socket.CMSG_LEN(_MOST_DESCRIPTORS * _DESCRIPTOR))
    except ConnectionError:
        raise EOFError from None
    # One of rights at most; the system leaves no torn one.
    fds = [fd for _, _, content in ancillary for fd in array.array("i", content)]
    for fd in fds:
        os.set_inheritable(fd, False)
    if not data:
        raise EOFError
    try:
        return decode(data), fds
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise


def signal_news(sock: socket.socket) -> None:
    """From now on, `receive` does not wait, and this process gets SIGIO when there is something to receive."""
    sock.setblocking(False)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)


# --------------------------------------------------------------------------------------------------------------------
# The key of a server: everything in which the processes of two clients could differ, but for what each hands over.
#
# A client hands over its variables, working directory, umask, descriptors and signals. Whatever else differs, such as
# a limit, a right or a namespace, leads to another server.

try:
    # hashlib takes milliseconds to import.
    from _md5 import md5
except ImportError:
    # This interpreter leaves it to OpenSSL.
    from hashlib import md5

# Read by the interpreter, the loader or the C library when a process starts.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "GCONV_", "LOCPATH")
# Lines of /proc/self/status that a fork inherits and cannot set back.
_STATUS = ("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp", "Cpus_allowed:", "Mems_allowed:", "Speculation")
_LINKS = ("root", *(f"ns/{name}" for name in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")))
_FILES = ("cgroup", "attr/current", "personality", "oom_score_adj", "coredump_filter", "timerslack_ns")


def server_key(path: list[str]) -> str:
    """The key for this process. `path`: its sys.path without the entry of the program."""
    interpreter = (__version__, sys.executable, sys.version, sys.prefix, tuple(sys.flags), sys.warnoptions, path)
    options = sorted(repr(option) for option in sys._xoptions.items())
    environ = sorted((name, value) for name, value in os.environ.items() if name.startswith(_READ_AT_START))
    scheduling = (sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
    status = [line for line in _read("status").splitlines() if line.startswith(_STATUS)]
    links = [_target(name) for name in _LINKS]
    files = [_read(name) for name in _FILES]
    facts = (interpreter, options, environ, _limits(), scheduling, status, links, files)
    digest: str = md5(repr(facts).encode(errors="surrogateescape")).hexdigest()
    return digest


def _limits() -> list[tuple[int, int]]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return [resource.getrlimit(getattr(resource, name)) for name in names]


def _target(name: str) -> str:
    """The target of a link of this process in /proc; nothing if there is none."""
    path = f"/proc/self/{name}"
    return os.readlink(path) if os.path.lexists(path) else ""


def _read(name: str) -> str:
    """The text of a file of this process in /proc; nothing if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/self/{name}", encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def path_of_servers() -> list[str]:
    """This process's sys.path without the entry that `python -m` has put in front."""
    # Python has this flag since 3.11.
    is_safe = getattr(sys.flags, "safe_path", False)
    entries = sys.path if is_safe else sys.path[1:]
    return [entry for entry in entries if isinstance(entry, str)]


def folder_of_servers() -> str:
    """The private folder of this user's servers. Raises OSError if it cannot be made, or trusted."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = runtime if os.path.isdir(runtime) else "/tmp"
    path = os.path.join(parent, f"torch_testing_ext_warm_{os.getuid()}")
    try:
        return make_private(path, refused=0o077)
    except UnsafeFolder as error:
        raise PermissionError(str(error)) from None
