"""One rank among groups that do not communicate: its log, its store, and what it must not do."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import multiprocessing.process
import os
import pickle
import sys
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from torch_testing_ext import launch
from torch_testing_ext._collectives.sanitizer.call_recorder import CallRecorder
from torch_testing_ext._collectives.sanitizer.sanitizer_log import LogWriter
from torch_testing_ext._collectives.sanitizer.watched_works import WaitCheck
from torch_testing_ext._collectives.worlds.world_records import CUT
from torch_testing_ext._collectives.worlds.world_views import not_in_world
from torch_testing_ext._process import ends
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._testing.bases.fake_groups import FakeStore
from torch_testing_ext._testing.bases.group_creation import watch_creation
from torch_testing_ext._testing.bases.rank_accounts import account_for_skip
from torch_testing_ext._testing.bases.world_values import RankUses, WaitLog
from torch_testing_ext._tests.source_files import is_library
from torch_testing_ext._torch import torch_frames
from torch_testing_ext._torch.groups import dataless_groups, watched_groups
from torch_testing_ext._torch.operations import operation_hook, watched_waits
from torch_testing_ext._torch.replacing import Replacement, replace_for_good
from torch_testing_ext._torch.tensors import tensor_comparison, tensor_reads
from torch_testing_ext.launch.jobs import log_of

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


# The seconds for which a rank waits at most for those before it.
_LONGEST_WAIT = 3600.0


class NotForWorlds(RuntimeError):
    """The program does what a rank of a whole world cannot. `what`: in a sentence about the program."""

    # The first one of this process.
    first: ClassVar[NotForWorlds | None] = None

    def __init__(self, message: str, what: str):
        super().__init__(message)
        self.what = what
        NotForWorlds.first = NotForWorlds.first or self


class RankInWorld:
    """One rank among groups that do not communicate: its log, and what it must not do."""

    def __init__(self, context: launch.RankContext, timeout: float | None):
        self._rank = context.rank
        self._world_size = context.world_size
        self._place = context.place
        self._before = list(context.siblings)
        # A rank that is debugged has none.
        self._timeout = timeout or _LONGEST_WAIT
        self._store = _StoreOfWorld(context.directory / "store_of_world", context.world_size)
        self._log = LogWriter(log_of(context.directory, context.rank))
        waits = WaitLog()
        self._works = WaitCheck(self._note, lambda: self._recorder.site())
        self._recorder = CallRecorder(self._log, [waits, self._works], without_data=True)
        self.uses = RankUses(self._on_wait, self._on_value)
        waits.uses = self.uses
        # Whether the program has made the default group, which is there before.
        self._is_initialized = False
        # What has been noted of values, and where.
        self._noted: set[tuple[str, str, int]] = set()

    def _on_wait(self, number: int) -> None:
        self._log.wait(number, self._recorder.site())

    def _note(self, kind: str, text: str, site: int, issued: int) -> None:
        self._log.note({"kind": kind, "text": text, "issued": issued}, site)

    # -- a listener of works and their futures, for the host's waits and for work that is used wrongly

    def _on_wait_for_work(self, work: Any) -> None:
        self.uses.waited(work)
        self._works.waited(work)

    def future_taken(self, work: Any, future: Any) -> None:
        self.uses.future_taken(work, future)
        self._works.future_taken(work, future)

    def future_used(self, future: Any) -> None:
        self.uses.future_used(future)
        self._works.future_used(future)

    def future_chained(self, future: Any, result: Any) -> None:
        self.uses.future_chained(future, result)
        self._works.future_chained(future, result)

    def _on_value(self, kind: str, text: str) -> None:
        noted = kind, text, self._recorder.site()
        if noted not in self._noted:
            self._noted.add(noted)
            self._log.note({"kind": kind, "text": text}, noted[-1])

    @contextlib.contextmanager
    def active(self, judges: bool) -> Iterator[None]:
        """Be this rank, in a process that ends soon: nothing is restored. `judges`: assertions hold for all values."""
        watched_groups.forget_groups()
        size = str(self._world_size)
        local_size = str(self._place.local_world_size)
        os.environ.update(RANK=str(self._rank), LOCAL_RANK=str(self._place.local_rank))
        os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=local_size)
        watch_creation()
        self._make_groups_fake()
        self._watch_stores()
        dist.init_process_group("fake", store=self._store, rank=self._rank, world_size=self._world_size)
        self._is_initialized = False
        self._recorder.note_groups()
        self._refuse()
        operation_hook.hook.tell(self._recorder)
        hears = watched_waits.WaitListener(self._on_wait_for_work, None, self, self._works.wait_is_over)
        watched_waits.hooks.tell(hears)
        tensor_reads.listen_to_reads(self.uses)
        Replacement("waits for devices", lambda name, wait: self.uses.synchronize)
        Replacement("sizes of storages", lambda name, resize: self.uses.watched_resize(resize))
        replace_for_good("copies in a world", lambda name, copy: self.uses.watched_copy(copy))
        if not judges:
            self.uses.leave_assertions(unittest.TestCase)
            tensor_comparison.wrap_differences(self.uses.without_differences)
        with self.uses:
            yield

    def finish(self) -> None:
        """The body has ended."""
        operation_hook.hook.leave(self._recorder)
        self._recorder.note_groups()
        self._works.finish()
        self._log.memory(self.uses.most)
        # The log has all: nobody needs to ask torch for it.
        watched_groups.forget_groups()
        if self._recorder.error:
            raise RuntimeError(self._recorder.error)

    def settle(self, account: launch.AccountWriter, is_test: bool) -> None:
        """Correct the account of the body: what it has failed by may say nothing of the program.

        `is_test`: it was written for ranks that communicate, so it need not suit a world.
        """
        failed, refused = account.account, NotForWorlds.first
        if failed is None or not failed.ending.is_failure:
            return
        if refused is not None:
            # The program may have caught it, and raised another one.
            account.withdraw()
            if is_test:
                place = next(iter(_own_sites(launch.sites_of(refused))), "")
                why = f"{refused.what}   {place}".rstrip()
                account_for_skip(account, not_in_world(self._world_size, why))
            else:
                account.failed(refused, assertion=False)
        elif is_test and failed.ending is launch.RankEnding.FAILED and self.uses.has_read:
            account.withdraw()
            sites = [self._log.site(site) for site in _own_sites(failed.error.sites)]
            self._log.note({"kind": CUT, "text": ""}, next(iter(sites), 0))

    def _make_groups_fake(self) -> None:
        """Let each group have the fake backend, whatever it is made for, and the default group be there already."""
        init = dist.init_process_group
        signature = inspect.signature(init)
        dataless_groups.make_groups_fake(lambda: self._recorder.note_groups(self._recorder.site()))

        @functools.wraps(init)
        def have(*args: Any, **kwargs: Any) -> None:
            asked = signature.bind_partial(*args, **kwargs).arguments.get("world_size", -1)
            if asked not in (-1, self._world_size):
                text = f"the program makes a world of {asked} ranks, and this one has {self._world_size}"
                raise NotForWorlds(text, f"fixes its world size to {asked}")
            if not dist.is_initialized():
                init("fake", store=self._store, rank=self._rank, world_size=self._world_size)
            elif self._is_initialized:
                # It says that the group is there.
                init(*args, **kwargs)
            self._is_initialized = True

        replace_for_good("start of a world", lambda name, original: have)

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

        def waiting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(store: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
                wait_for(store, [keys] if isinstance(keys, str) else keys)
                return method(store, keys, *args, **kwargs)

            return call

        replace_for_good("waits at stores in a world", waiting)

    def _next_source(self, number: int) -> int:
        """A rank that may have sent a message which any rank may send; which one it is, no rank of a world knows."""
        others = self._world_size - 1
        return (self._rank + 1 + number % others) % self._world_size if others else 0

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

        def own_objects(name: str, original: Any) -> Callable[..., Any]:
            def make(*args: Any, **kwargs: Any) -> Any:
                caller = torch_frames.call_of_objects(sys._getframe(1))
                if caller in ("all_gather_object", "gather_object"):
                    raise _refusal_of_objects(caller)
                return original(*args, **kwargs)

            return make

        def receive_objects(*_: object, **__: object) -> None:
            raise _refusal_of_objects("recv_object_list")

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
                    raise _refusal_of_objects(function.__name__)
                try:
                    return function(*args, **kwargs)
                except (EOFError, pickle.UnpicklingError):
                    # In torch 2.11, a scatter in a group that does not communicate leaves the source without its part.
                    raise _refusal_of_objects(function.__name__) from None

            return call

        replaced = {
            "recv_object_list": receive_objects,
            "broadcast_object_list": of_source(dist.broadcast_object_list),
            "scatter_object_list": of_source(dist.scatter_object_list),
            # Else, torch looks whether the group has gloo.
            "monitored_barrier": lambda group=None, *_, **__: dist.barrier(group),
        }
        replace_for_good("objects in a world", lambda name, original: replaced[name])
        replace_for_good("objects of others in a world", own_objects)
        # Each of the others in turn: as if all sent as much.
        sources = itertools.count()
        replace_for_good(
            "sources of messages in a world", lambda name, original: lambda work: self._next_source(next(sources))
        )
        sys.addaudithook(refuse)
        multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign, assignment]
        replace_for_good("sockets in a world", lambda name, original: store)
        replace_for_good("NCCL in a world", lambda name, original: nccl)


def _own_sites(sites: Sequence[Site]) -> list[Site]:
    """The lines of the program among those of an exception, innermost first."""
    return [site for site in reversed(sites) if not is_library(site.file)]


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


def _refusal_of_objects(function: str) -> NotForWorlds:
    if torch_frames.is_in_checkpoint(sys._getframe(1)):
        what = f"has a distributed checkpoint, which calls {function}() for objects of other ranks"
        text = f"the program {what}, and these do not communicate: leave it out of the step, or give it no_dist=True"
        return NotForWorlds(text, what)
    return _refusal(f"calls {function}(), which waits for objects of another rank")


def _refusal(what: str) -> NotForWorlds:
    text = f"the program {what}, which a rank of a whole world cannot: it does not communicate"
    return NotForWorlds(text, what)
