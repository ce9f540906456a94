"""Whole worlds: all ranks of a function, in forks that do not communicate, and what they would have done together."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import json
import multiprocessing.process
import os
import sys
import threading
import unittest
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from torch_testing_ext._collectives.failure import FailureView, Site
from torch_testing_ext._collectives.findings.finding import FindingKind
from torch_testing_ext._collectives.findings.opposite_orders import first_inversion
from torch_testing_ext._collectives.sanitizer.call_recorder import CallRecorder
from torch_testing_ext._collectives.sanitizer.operation_checks import Check, inputs_of, outputs_of
from torch_testing_ext._collectives.sanitizer.sanitizer_log import ALL, LogReader, LogWriter
from torch_testing_ext._collectives.worlds import world_traffic, world_views
from torch_testing_ext._collectives.worlds.world_progress import Progress, judge
from torch_testing_ext._collectives.worlds.world_records import WorldRecords, bytes_of
from torch_testing_ext._process import ends, fork_safety, sessions, signals, system, temporary_folders
from torch_testing_ext._process.source_files import is_library
from torch_testing_ext._process.words import few, grouped, list_of
from torch_testing_ext._testing.bases.fake_groups import FakeStore
from torch_testing_ext._testing.bases.group_creation import watch_creation
from torch_testing_ext._testing.bases.rank_verdicts import RankError, RankFailure
from torch_testing_ext._testing.marks.settings_of_tests import WHOLE_WORLD
from torch_testing_ext._torch import imported_garbage, torch_frames
from torch_testing_ext._torch.groups import dataless_groups, watched_groups
from torch_testing_ext._torch.operations import operation_hook, watched_waits, works
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.operations.tensor_uses import TensorUses
from torch_testing_ext._torch.tensors import nested_tensors, tensor_comparison, tensor_reads
from torch_testing_ext._torch.torch_frames import program_places
from torch_testing_ext.launch import environment
from torch_testing_ext.launch.account_writer import format_error, sites_of, summarize
from torch_testing_ext.launch.fork_server import MANY_RANKS
from torch_testing_ext.launch.user_warnings import show_to_user

# What a rank that does not communicate must not do: the events of Python, in words.
_REFUSED = {
    "os.exec": "starts a process",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "subprocess.Popen": "starts a process",
    "socket.bind": "opens a socket",
    "socket.connect": "opens a socket",
    "socket.sendmsg": "opens a socket",
    "socket.sendto": "opens a socket",
}
_SYNCHRONIZES = (("cuda", "synchronize"), ("accelerator", "synchronize"), ("xpu", "synchronize"))
_DTENSOR = "torch.distributed.tensor"
_STACKS, _LOG, _RESULT = "stacks", "log", "result"
# The exit code of a rank that has no result.
_CANNOT_WRITE = 74


# --------------------------------------------------------------------------------------------------------------------
# The world as its user knows it.


@dataclass(frozen=True)
class World:
    """The ranks of a whole world, after the fact. Each list has an entry for each rank."""

    world_size: int
    # The most calls each of which had to wait for the one before.
    longest_chain: int
    # The ranks of each class: those in it have issued the same calls at the same lines.
    classes: list[list[int]]
    # Lines that read values which were not communicated, and collectives in opposite orders that nobody waits in.
    warnings: list[str]
    _records: WorldRecords
    _memory: list[int]

    def calls(self, group: str | None = None, op: str | None = None) -> list[int]:
        """Count the calls of each rank: of one operation, in the groups of a name or of a dimension of a mesh."""
        return [len(issued) for issued in self._records.issued(group, op)]

    def bytes(self, group: str | None = None, op: str | None = None) -> list[int]:
        """Add up the bytes that each rank handed over as inputs of these calls."""
        return [sum(map(bytes_of, issued)) for issued in self._records.issued(group, op)]

    def memory(self) -> list[int]:
        """The most bytes that the tensors of each rank had at once."""
        return list(self._memory)

    def traffic(self, block: int = 1) -> list[list[int]]:
        """The bytes that each rank (row) sends to each other (column); with `block`, those of blocks of neighbours.

        A collective counts as the least that each rank must send, spread evenly over the other members.
        """
        if block < 1:
            raise ValueError(f"a block has at least one rank, not {block}")
        return world_traffic.traffic(self._records, block)


def check_world(
    function: Callable[..., object],
    world_size: int,
    *args: object,
    buffered_sends: bool = False,
    timeout: float = 60.0,
    **kwargs: object,
) -> World:
    """Run `function(rank, world_size, *args, **kwargs)` as each rank of a world, and compare what the ranks did.

    Each rank runs in a fork of its own, as many at once as there are cores. Its process groups do not communicate, so
    values are not those of a real run. Raises RankFailure if ranks disagree, and RankError if ranks would wait for ever
    or one fails. `buffered_sends`: a send ends before its message is received. `timeout`: in seconds, of each rank.
    """
    __tracebackhide__ = True
    if world_size < 1:
        raise ValueError(f"a world has at least one rank, not {world_size}")
    ranks = run_ranks(lambda rank: function(rank, world_size, *args, **kwargs), world_size, timeout)
    return judge_ranks(ranks, buffered_sends)


def run_ranks(body: Callable[[int], object], world_size: int, timeout: float, is_test: bool = False) -> Ranks:
    """Run all ranks. `is_test`: the body is that of a test which was written for ranks that communicate."""
    if dist.is_initialized():
        raise RuntimeError("this process has a process group: check a whole world before it makes one, or destroy it")
    _require_forks(fork_safety.prepare_to_fork())
    was_installed = operation_hook.is_installed()
    operation_hook.install()
    try:
        with temporary_folders.temporary_folder("torch_testing_ext-world-") as folder:
            ranks = Ranks(folder, world_size, timeout, body, is_test)
            ranks.run()
    finally:
        if not was_installed:
            operation_hook.remove()
    return ranks


def judge_ranks(ranks: Ranks, buffered_sends: bool = False) -> World:
    """Compare what the ranks did. Raises RankFailure or RankError, or SkipTest for a test that cannot be judged."""
    __tracebackhide__ = True
    if ranks.errors:
        alike_in = grouped((text, rank) for rank, (text, _) in ranks.errors.items())
        lines = [f"{list_of(alike)}: {text}" for text, alike in alike_in.items()]
        first = min(ranks.errors)
        _, whole = ranks.errors[first]
        text = "\n".join([f"{len(ranks.errors)} of {ranks.world_size} ranks failed", *few(lines), "", whole])
        error = RankFailure(text) if ranks.assertions.get(first) else RankError(text)
        error.failure = FailureView.of_text(text, title=lines[0].partition("\n")[0])
        raise error
    progress = Progress(ranks.records, buffered_sends)
    if world_views.noted_worlds is not None:
        not_judged = [*ranks.not_judged, *ranks.cuts]
        with_calls = environment.read_settings().lanes
        world_views.noted_worlds.append(world_traffic.view_of(ranks.records, progress.chain, not_judged, with_calls))
    finding = judge(ranks.records, progress, is_cut=bool(ranks.cuts))
    if finding is not None:
        classes = "\n".join(few([str(alike) for alike in ranks.records.classes]))
        text = f"{finding.text}\n\n{classes}"
        # As in a real run: ranks that disagree fail, and ranks that hang are an error.
        hangs = finding.kind in (FindingKind.DEADLOCK, FindingKind.ABANDONED)
        found = RankError(text) if hangs else RankFailure(text)
        found.failure = FailureView.of_text(text, next(iter(finding.sites), None), title=finding.title)
        raise found
    if ranks.cuts:
        # What the ranks did until there has been compared.
        raise unittest.SkipTest(f"not judged: compares communicated values at {next(iter(ranks.cuts))}")
    warnings = [f"{list_of(alike)}: {text}" for text, alike in ranks.warnings.items()]
    warnings += [f"not judged: compares communicated values at {line}" for line in ranks.not_judged]
    inversion = first_inversion(ranks.records.records)
    if inversion is not None:
        # They do not wait for each other here. With NCCL, they may.
        warnings.append("\n".join([inversion.sentence, *map(str, inversion.lines)]))
    for line in few(warnings):
        show_to_user(line)
    classes_of_ranks = [alike.ranks for alike in ranks.records.classes]
    return World(ranks.world_size, progress.chain, classes_of_ranks, warnings, ranks.records, ranks.memory)


Function = TypeVar("Function", bound=Callable[..., Any])


def whole_world(world_size: int, *, buffered_sends: bool = False, timeout: float = 60.0) -> Callable[[Function], Any]:
    """Decorator: run a test as each rank of a world, without communication.

    The test is called with the arguments `rank` and `world_size`, besides its own. The runner's option --world N
    replaces the size.
    """

    def decorate(function: Function) -> Any:
        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True

            def run(rank: int, size: int) -> None:
                function(*args, rank=rank, world_size=size, **kwargs)

            chosen = environment.read_settings().world or world_size
            check_world(run, chosen, buffered_sends=buffered_sends, timeout=timeout)

        setattr(test, WHOLE_WORLD, True)
        signature = inspect.signature(function)
        own = [parameter for name, parameter in signature.parameters.items() if name not in ("rank", "world_size")]
        test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return test

    return decorate


# --------------------------------------------------------------------------------------------------------------------
# The forks.


class Ranks:
    """Runs all ranks, each in a fork, and collects what they have left."""

    def __init__(
        self, folder: Path, world_size: int, timeout: float, body: Callable[[int], object], is_test: bool = False
    ):
        self._folder = folder
        self.world_size = world_size
        self._is_test = is_test
        self._timeout = timeout
        self._body = body
        self._running: dict[int, int] = {}
        self.records = WorldRecords()
        # By rank: one line, and the traceback.
        self.errors: dict[int, tuple[str, str]] = {}
        # Those that failed by an assertion.
        self.assertions: dict[int, bool] = {}
        # By text: the ranks.
        self.warnings: dict[str, list[int]] = {}
        self.memory: list[int] = []
        # Of a test: the lines whose assertions compare values that were not communicated; those that ended a rank.
        self.not_judged: dict[str, None] = {}
        self.cuts: dict[str, None] = {}
        self._imported: list[str] = []

    def run(self) -> None:
        """Run all ranks, and end those that are left if this is interrupted."""
        most = system.cores()
        try:
            for rank in range(self.world_size):
                self._running[self._fork(rank)] = rank
                if rank == 0:
                    _require_forks(fork_safety.check_after_fork())
                    self._wait()
                    self._preload()
                    if self.world_size >= MANY_RANKS:
                        # A fork then copies fewer page tables.
                        system.collapse_all()
                if len(self._running) >= most:
                    self._wait()
                if self.errors and len(self.errors) >= _ENOUGH_ERRORS:
                    break
            while self._running:
                self._wait()
        finally:
            for pid in self._running:
                signals.signal_group(pid, 9)
                ends.wait_for_exit(pid)

    def _preload(self) -> None:
        """Import what rank 0 has imported of torch: else all ranks do so again, which may take seconds."""
        for name in self._imported:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if self._imported:
            _require_forks(fork_safety.check_after_fork())

    def _fork(self, rank: int) -> int:
        place = _Place(self._folder, rank, self.world_size, list(self._running))
        return sessions.fork_child(lambda: _run_rank(place, self._timeout, self._body, self._is_test))

    def _wait(self) -> None:
        """Wait for the end of one rank, and take what it has left."""
        pid = next(iter(self._running))
        # In their order: the ranks are alike, and their records are kept by rank.
        code = ends.wait_and_end_group(pid)
        rank = self._running.pop(pid)
        files = {name: self._folder / f"{rank}.{name}" for name in (_LOG, _RESULT, _STACKS, "output")}
        result: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            result = json.loads(files[_RESULT].read_text("utf-8"))
        output = files["output"].read_text("utf-8", "replace") if files["output"].exists() else ""
        if "skipped" in result:
            raise unittest.SkipTest(result["skipped"])
        if self._is_test and "unsuitable" in result:
            raise unittest.SkipTest(world_views.not_in_world(self.world_size, result["unsuitable"]))
        if "error" in result:
            self.assertions[rank] = result["failed"]
            self.errors[rank] = result["error"], "\n".join([result["traceback"], output])
        elif not result:
            stacks = files[_STACKS].read_text("utf-8", "replace") if files[_STACKS].exists() else ""
            how = ends.describe_exit(code)
            if code == _CANNOT_WRITE:
                how = f"could not write its result into {self._folder}"
            if "Timeout" in stacks:
                how = f"has not ended within {self._timeout:g} s"
            self.errors[rank] = how, f"{stacks}\n{output}"
        else:
            self._imported = result["imported"]
            self.memory.append(result["memory"])
            for text in result["warnings"]:
                self.warnings.setdefault(text, []).append(rank)
            self.not_judged.update(dict.fromkeys(result["not_judged"]))
            self.cuts.update(dict.fromkeys(result["cut"]))
            if not self.errors:
                self.records.add([LogReader(files[_LOG])])
        for file in files.values():
            file.unlink(missing_ok=True)


def _require_forks(unsafe: str | None) -> None:
    """Raise an error if there is a reason why this process cannot fork."""
    if unsafe is not None:
        raise RuntimeError(f"the ranks of a whole world are forks, and this process cannot fork: {unsafe}")


# Enough to see which ranks fail alike.
_ENOUGH_ERRORS = 64


@dataclass(frozen=True)
class _Place:
    """The place of a rank in its world. `before`: the processes of the ranks before it that still run."""

    folder: Path
    rank: int
    world_size: int
    before: list[int]


def _run_rank(place: _Place, timeout: float, body: Callable[[int], object], is_test: bool) -> NoReturn:
    """Be one rank: run the body, and leave a log and a result."""
    folder, rank = place.folder, place.rank
    imported_garbage.exempt_imported(None)
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    sessions.detach(output)
    signals.unblock()
    with open(folder / f"{rank}.{_STACKS}", "w") as stacks:  # closed by the end
        faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
        result: dict[str, Any] = {}
        before = set(sys.modules)
        try:
            torch.set_num_threads(1)
            in_world = _RankInWorld(LogWriter(folder / f"{rank}.{_LOG}"), place, timeout)
            cut = []
            try:
                with in_world.active(judges=not is_test):
                    body(rank)
            except AssertionError as error:
                if not is_test or not in_world.uses.has_read:
                    raise
                cut = [place_of(error)]
            finally:
                in_world.finish()
            imported = [name for name in sys.modules if name not in before and name.startswith("torch.")]
            uses = in_world.uses
            result = {"memory": uses.most, "warnings": uses.warnings, "imported": imported}
            result |= {"not_judged": list(uses.not_judged), "cut": cut}
        except BaseException as error:
            result = {"error": _line_of(error), "traceback": format_error(error)}
            result["failed"] = isinstance(error, AssertionError)
            if isinstance(error, NotForWorlds):
                result["unsuitable"] = f"{error.what}   {place_of(error)}".rstrip()
            # That of unittest, or of pytest.
            if isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped":
                result["skipped"] = str(error)
        try:
            (folder / f"{rank}.{_RESULT}").write_text(json.dumps(result), "utf-8")
        except OSError:
            sessions.exit_now(_CANNOT_WRITE)
        sessions.exit_now(0)


def _line_of(error: BaseException) -> str:
    """Describe an exception by its first line, and the line of the program that raised it."""
    place = place_of(error)
    return summarize(error) + (f"   {place}" if place else "")


def place_of(error: BaseException) -> str:
    """The line of the program that raised an exception."""
    own = [site for site in sites_of(error) if not is_library(site.file)]
    return str(own[-1]) if own else ""


class NotForWorlds(RuntimeError):
    """The program does what a rank of a whole world cannot. `what`: in a sentence about the program."""

    def __init__(self, message: str, what: str):
        super().__init__(message)
        self.what = what


class _RankInWorld:
    """One rank among groups that do not communicate: its log, and what it must not do."""

    def __init__(self, log: LogWriter, place: _Place, timeout: float):
        self._rank = place.rank
        self._world_size = place.world_size
        self._before = place.before
        self._timeout = timeout
        self._store = _StoreOfWorld(place.folder / "store", place.world_size)
        self._log = log
        waits = _WaitLog()
        self._recorder = CallRecorder(log, [waits], without_data=True)
        self.uses = RankUses(self._on_wait, lambda: self._recorder.line())
        waits.uses = self.uses

    def _on_wait(self, number: int) -> None:
        self._log.wait(number, self._recorder.site())

    @contextlib.contextmanager
    def active(self, judges: bool) -> Iterator[None]:
        """Be this rank, in a process that ends soon: nothing is restored. `judges`: assertions hold for all values."""
        watched_groups.forget_groups()
        rank, size = str(self._rank), str(self._world_size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        watch_creation()
        self._make_groups_fake()
        self._watch_stores()
        dist.init_process_group("fake", store=self._store, rank=self._rank, world_size=self._world_size)
        self._recorder.note_groups()
        self._refuse()
        operation_hook.listen(self._recorder)
        watched_waits.watch_waits(self.uses.waited, None)
        tensor_reads.listen_to_reads(self.uses)
        for module, name in _SYNCHRONIZES:
            if hasattr(torch, module):
                setattr(getattr(torch, module), name, self.uses.synchronize)
        torch.UntypedStorage.resize_ = self.uses.watched_resize(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
        torch.Tensor.cpu = self.uses.watched_copy(torch.Tensor.cpu)  # type: ignore[method-assign]
        if not judges:
            self.uses.leave_assertions(unittest.TestCase)
            tensor_comparison.wrap_differences(self.uses.without_differences)
        with self.uses:
            yield

    def finish(self) -> None:
        """The body has returned."""
        operation_hook.listen(None)
        self._recorder.note_groups()
        if self._recorder.error:
            raise RuntimeError(self._recorder.error)

    def _make_groups_fake(self) -> None:
        """Let each group have the fake backend, whatever it is made for, and the default group be there already."""
        init = dist.init_process_group
        dataless_groups.make_groups_fake(lambda: self._recorder.note_groups(self._recorder.site()))

        @functools.wraps(init)
        def have(*args: Any, **kwargs: Any) -> None:
            asked = kwargs.get("world_size", -1)
            if not dist.is_initialized():
                init("fake", store=self._store, rank=self._rank, world_size=self._world_size)
            elif asked not in (-1, self._world_size):
                text = f"the program makes a world of {asked} ranks, and this one has {self._world_size}"
                raise NotForWorlds(text, f"fixes its world size to {asked}")

        dist.distributed_c10d.init_process_group = dist.init_process_group = have

    def _watch_stores(self) -> None:
        """Let a rank wait in a store for ranks before it, and for no others: these run when it has ended."""

        def wait_for(store: Any, keys: Sequence[str]) -> None:
            if store.check(keys) or threading.active_count() > 1:
                # Another thread may set it.
                return
            ends.wait_until_gone(self._before, self._timeout)
            for key in keys:
                if not store.check([key]):
                    unset = f"for {key!r} in a store, which no rank before it has set"
                    text = f"the program waits {unset}, and the ranks after it run when it has ended"
                    raise NotForWorlds(text, f"waits on rank {self._rank} {unset}")

        def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(store: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
                wait_for(store, [keys] if isinstance(keys, str) else keys)
                return method(store, keys, *args, **kwargs)

            return call

        stores: Any = dist
        for name in ("get", "multi_get", "wait"):
            setattr(stores.Store, name, waiting(getattr(stores.Store, name)))

    def _refuse(self) -> None:
        """Refuse what would reach out of the world: it would hang, or do harm."""

        def refuse(event: str, _: object) -> None:
            what = _REFUSED.get(event)
            if what is not None:
                raise _refusal(what)

        def start(*_: object) -> None:
            raise _refusal("starts a process")

        def store(*_: object, **__: object) -> None:
            raise _refusal("opens a socket")

        def nccl(*_: object, **__: object) -> None:
            raise _refusal("calls NCCL itself")

        def receive_objects(*_: object, **__: object) -> None:
            raise _refusal("calls recv_object_list(), which waits for objects of another rank")

        def of_source(function: Callable[..., Any]) -> Callable[..., Any]:
            """The function, which only the source may call: others wait for its objects."""
            signature = inspect.signature(function)

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                given = signature.bind(*args, **kwargs).arguments
                source, own = given.get("src"), self._rank
                if given.get("group_src") is not None:
                    source, own = given["group_src"], dist.get_rank(given.get("group"))
                if (source or 0) != own:
                    raise _refusal(f"calls {function.__name__}(), which waits for objects of another rank")
                return function(*args, **kwargs)

            return call

        replaced = {
            "recv_object_list": receive_objects,
            "broadcast_object_list": of_source(dist.broadcast_object_list),
            "scatter_object_list": of_source(dist.scatter_object_list),
            # Else, torch looks whether the group has gloo.
            "monitored_barrier": lambda group=None, *_, **__: dist.barrier(group),
        }
        for name, function in replaced.items():
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)
        sys.addaudithook(refuse)
        multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign, assignment]
        stores: Any = dist
        stores.TCPStore.__init__ = store
        for name in ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "init_rank", "unique_id"):
            setattr(torch.cuda.nccl, name, nccl)


class _StoreOfWorld(FakeStore):
    """The store of the default group: a file of all ranks, made where a program uses it."""

    def __init__(self, file: Path, world_size: int):
        super().__init__()
        stores: Any = dist
        self._made = functools.cache(lambda: stores.FileStore(str(file), world_size))

    def set(self, *args: Any) -> None:
        self._made().set(*args)

    def get(self, key: str) -> Any:
        return self._made().get(key)

    def add(self, key: str, amount: int) -> Any:
        return self._made().add(key, amount)

    def check(self, keys: list[str]) -> Any:
        return self._made().check(keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._made().wait(keys, *timeout)

    def compare_set(self, *args: Any) -> Any:
        return self._made().compare_set(*args)

    def delete_key(self, key: str) -> Any:
        return self._made().delete_key(key)


def _refusal(what: str) -> NotForWorlds:
    text = f"the program {what}, which a rank of a whole world cannot: it does not communicate"
    return NotForWorlds(text, what)


class _WaitLog(Check):
    """Tells which operation has issued which work and written which tensors."""

    wants_results = True
    uses: RankUses

    def after(self, spec: OpSpec, args: tuple[Any, ...], result: Any, site: int, number: int) -> Any:
        outputs = outputs_of(spec, args)
        is_vote = spec.kind == "recv" and torch_frames.is_vote(torch_frames.issuer_of(sys._getframe(2)))
        if is_vote:
            # As this one.
            outputs[0].fill_(1)
        complete = works.with_complete_work(result, outputs or inputs_of(spec, args))
        is_awaited = operation_hook.is_synchronous(spec, args)
        self.uses.issued(number, None if is_awaited else works.work_of(complete), [] if is_vote else outputs)
        return complete


class RankUses(TensorUses):  # type: ignore[no-untyped-call]
    """Follows the tensors of a rank: their bytes, and which of them depend on values of other ranks."""

    def __init__(self, on_wait: Callable[[int], None], line: Callable[[], Site | None]):
        super().__init__(None)
        self._on_wait_for = on_wait
        self._line = line
        # By storage: its bytes, and the latest call that its values depend on.
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._depends: dict[int, int] = {}
        self._works: dict[int, tuple[Any, int]] = {}
        self._bytes = 0
        self.most = 0
        self.warnings: list[str] = []
        # A value of other ranks has been read.
        self.has_read = False
        # The lines of assertions that have read such a value, or have failed after that.
        self.not_judged: dict[str, None] = {}
        self._asserts = 0

    # -- assertions of a test, which may be about values that nobody has communicated

    @contextlib.contextmanager
    def _asserting(self) -> Iterator[None]:
        """A context in which such a value may be read: that is noted, and no warning."""
        self._asserts += 1
        try:
            yield
        finally:
            self._asserts -= 1

    def leave_assertions(self, case: type) -> None:
        """Let the assertions of a class, and of all that derive from it, end no rank for such values."""
        for name, function in list(vars(case).items()):
            if name.startswith("assert") and inspect.isfunction(function):
                setattr(case, name, self.not_judging(function))
        heirs: list[type] = case.__subclasses__()
        for heir in heirs:
            self.leave_assertions(heir)

    def not_judging(self, assertion: Callable[..., Any]) -> Callable[..., Any]:
        """An assertion that notes its line instead, if it is about such values."""

        @functools.wraps(assertion)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._asserting():
                    return assertion(*args, **kwargs)
            except AssertionError:
                if not self.has_read:
                    raise
                self.not_judged[_place_here()] = None
                return None

        return call

    def without_differences(self, find: Callable[..., Any]) -> Callable[..., Any]:
        """Leave differences between such values out of what `find` has found."""

        @functools.wraps(find)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._asserting():
                found = find(*args, **kwargs)
            if not found or not self.has_read:
                return found
            self.not_judged[_place_here()] = None
            return []

        return call

    # -- calls

    def issued(self, number: int, work: Any, outputs: Sequence[torch.Tensor]) -> None:
        if work is not None:
            self._works[id(work)] = work, number
        for tensor in outputs:
            self._hold(tensor, number)

    def waited(self, work: Any) -> None:
        """Somebody waits for a work."""
        _, number = self._works.pop(id(work), (None, None))
        if number is not None:
            self._on_wait_for(number)

    def synchronize(self, *_: object, **__: object) -> None:
        """Stands for `synchronize` of devices."""
        self._on_wait_for(ALL)

    # -- reads

    def watched_copy(self, copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A method that copies a tensor to the host, which waits for its values."""

        @functools.wraps(copy)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            number = self._depends.get(_storage(tensor))
            if number is not None:
                self._on_wait_for(number)
            return copy(tensor, *args, **kwargs)

        return call

    def on_read(self, method: str, tensor: torch.Tensor) -> None:
        if method != "__repr__":
            self._read(method, tensor)

    def on_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """It has the same storage."""

    def _read(self, method: str, tensor: torch.Tensor) -> None:
        number = self._depends.get(_storage(tensor))
        if number is None:
            return
        self._on_wait_for(number)
        self.has_read = True
        if self._asserts:
            self.not_judged[_place_here()] = None
            return
        text = f"{method}() reads a value that other ranks have a part in, and that a whole world does not know"
        text += f"   {self._line()}"
        if text not in self.warnings:
            self.warnings.append(text)

    # -- operations

    def leaves(self, types: Any) -> bool:
        return any(kind.__module__.startswith(_DTENSOR) for kind in types)

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func._schema.name == "aten::equal":
            for tensor in nested_tensors.tensors_in(args):
                self._read("equal", tensor)
        # Some operations on lists work in place and return nothing.
        made = list(nested_tensors.tensors_in(args if result is None else result))
        if func.namespace == "_c10d_functional" and func._schema.name.endswith("wait_tensor"):
            number = self._depends.get(_storage(made[0])) if made else None
            if number is not None:
                self._on_wait_for(number)
            return
        depends = -1
        if self._depends:
            for tensor in nested_tensors.tensors_in((args, kwargs)):
                depends = max(depends, self._depends.get(_storage(tensor), -1))
        for tensor in made:
            self._hold(tensor, depends)

    def _hold(self, tensor: torch.Tensor, depends: int) -> None:
        """Count the storage of a tensor while it lives, and keep what its values depend on."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # it has none
            return
        if depends >= 0:
            self._depends[storage._cdata] = depends
        self._count(storage)

    def _count(self, storage: Any) -> None:
        """Count the bytes of a storage, which may have another size than before."""
        key, size = storage._cdata, storage.nbytes()
        before, reference = self._storages.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._free(key))
        self._storages[key] = size, reference
        self._bytes += size - before
        self.most = max(self.most, self._bytes)

    def watched_resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """A method by which FSDP frees the parameters that it has gathered; no operation tells of that."""

        @functools.wraps(resize)
        def call(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._storages:
                self._count(storage)
            return result

        return call

    def _free(self, key: int) -> None:
        size, _ = self._storages.pop(key)
        self._depends.pop(key, None)
        self._bytes -= size


def _place_here() -> str:
    """The line of the program that is running."""
    place = next(program_places(sys._getframe(1)), None)
    return "" if place is None else str(Site(*place))


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
