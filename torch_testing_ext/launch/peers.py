"""Looks for the other ranks of a launch: its variables may be left from somebody else.

A container of a training job has such variables, and so does the shell of a launcher. So a process is taken for a rank
only if another rank answers: by a socket with a name on the same machine, else in the store at MASTER_ADDR and
MASTER_PORT. A process that may become a peer, a launcher that runs, and another machine on which somebody may yet start
a rank are reasons to wait for that longer.
"""

from __future__ import annotations

import enum
import functools
import os
import socket
import sys
import threading
import time
from typing import Any

from torch_testing_ext._process import launcher_variables as variables, system, user_shell

from . import environment
from .environment import Launched, this_launch

# For the other ranks to begin, whose processes a launcher starts within moments.
LONGEST_WAIT_FOR_PEER = 2.0
# For them to import, where their processes or their launcher are there.
LONGEST_WAIT_FOR_IMPORTS = 120.0
# The answer of `why_no_rank`, for processes that this one starts in its own place: the workers of pytest-xdist.
NO_RANK = "_TORCH_TESTING_EXT_NO_RANK"
_OF_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_STEP = 0.05
# To try again to connect to a store that is not there yet.
_PAUSE = 0.25
_CONNECT_TIMEOUT = 5.0
# In the store: two ranks of the launch have found each other.
_SURE = "sure"
# Of the rank that others answer. Another one takes its place.
_LONGEST_SILENCE = 1.0


class PeerEvidence(enum.Enum):
    """The result of a look for other ranks."""

    NONE = "nothing shows that there is another rank"
    PROMISE = "another rank may yet answer"
    PEER = "another rank has answered"


class NoStore(RuntimeError):
    """The store of a launch on several machines was not found; the message says why."""


@functools.cache
def why_no_rank() -> str:
    """Say why this process is no rank although it has the variables of one; "" if it is one, or has none."""
    launched = this_launch()
    if launched is None:
        return ""
    # Programs that a test starts look for themselves.
    known = os.environ.pop(NO_RANK, None)
    why_not = user_shell.from_variable(known) if known else _wait_for_peer(launched)
    if why_not:
        environment.withdraw()
    if not launched.is_one_machine and not known:
        _store_of(launched).end_looking(is_rank=not why_not)
    return why_not


def _wait_for_peer(launched: Launched) -> str:
    """Return why this process is no rank; "" as soon as another rank has answered."""
    began = time.monotonic()
    is_said = False
    while (evidence := look(launched)) is not PeerEvidence.PEER:
        waited = time.monotonic() - began
        if waited > (LONGEST_WAIT_FOR_PEER if evidence is PeerEvidence.NONE else LONGEST_WAIT_FOR_IMPORTS):
            return _explain_left_variables(launched)
        if waited > LONGEST_WAIT_FOR_PEER and not is_said:
            is_said = True
            launched.say(_explain_wait(launched))
        time.sleep(_STEP)
    return ""


def look(launched: Launched) -> PeerEvidence:
    """Look for another rank of this launch, once."""
    if not system.LINUX:
        # Nothing is to be seen there.
        return PeerEvidence.PEER
    elsewhere = None if launched.is_one_machine else _store_of(launched)
    if _shows_itself(launched) or (elsewhere is not None and elsewhere.has_peer):
        return PeerEvidence.PEER
    if not os.path.exists("/proc/self/environ") or _may_come(launched):
        return PeerEvidence.PROMISE
    if elsewhere is None:
        return PeerEvidence.NONE
    if not elsewhere.has_address and system.ancestors() & variables.PROGRAMS:
        # The tests say what address the launcher has to be given.
        return PeerEvidence.PEER
    return PeerEvidence.PROMISE if elsewhere.is_promising() else PeerEvidence.NONE


# -- on this machine


def _shows_itself(launched: Launched) -> bool:
    """Has another rank announced itself on this machine, or does rank 0 listen there?"""
    others = (rank for rank in range(launched.world_size) if rank != launched.rank)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        if any(probe.connect_ex(launched.sign_of(rank)) == 0 for rank in others):
            return True
    if launched.rank == 0:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(launched.address) == 0


def _may_come(launched: Launched) -> bool:
    """Does a process of this machine have the variables of another rank?"""
    others = system.environments(variables.SIGNS)
    return any(NO_RANK not in environ and launched.is_with(environ, parent) for environ, parent in others)


# -- on other machines


class StoreConnection(threading.Thread):
    """Connects to the store at MASTER_ADDR and MASTER_PORT, shows this rank there, and looks for another one.

    A thread, since torch's store waits without a limit for one who has accepted its connection and says nothing.
    """

    def __init__(self, launched: Launched):
        super().__init__(name="torch_testing_ext store", daemon=True)
        self._launched = launched
        self._host = os.environ.get(variables.ADDRESS, "")
        self._port = os.environ.get(variables.PORT, "")
        self._has_agent = os.environ.get(_OF_AGENT_STORE) == "True"
        self._is_ready = threading.Event()
        # Ranks on other machines, which somebody starts by hand, find it there: until its name is looked up, perhaps.
        self._is_for_others = True
        self._is_looking = self._is_wanted = True
        self._store: Any = None
        # The latest reason why there is no store yet.
        self._why_not = ""
        self.has_peer = False

    @property
    def has_address(self) -> bool:
        return bool(self._host and self._port)

    def describe(self) -> str:
        why_not = f" ({self._why_not})" if self._why_not else ""
        return f" at {self._host}:{self._port}{why_not}" if self.has_address else ""

    def is_promising(self) -> bool:
        """May another rank yet show itself in the store?"""
        if not self.has_address or (self._is_ready.is_set() and self._store is None):
            return False
        if system.ancestors() & variables.PROGRAMS:
            return True
        has_others = self._store is not None and (self._has_agent or self._launched.rank > 0)
        return (has_others or self._is_for_others) and not system.is_beside_container(_names()[0][0])

    def store(self, timeout: float) -> Any:
        """Return the store. Raises NoStore if it is not there within this time."""
        if not self.has_address:
            raise NoStore(
                "this launch has several machines, whose ranks meet at MASTER_ADDR and MASTER_PORT: torchrun sets "
                "these; with srun or mpirun, set them to the machine of rank 0 and a port that is free there"
            )
        self._is_ready.wait(timeout)
        if self._store is None:
            raise NoStore(f"rank 0 of this launch was not found{self.describe()}. {how_to_unset()}")
        return self._store

    def end_looking(self, is_rank: bool) -> None:
        """Look for no other rank any more. A process that is no rank does not need the store, either.

        Python must not end while this thread is in the code of the store.
        """
        self._is_looking = False
        self._is_wanted = is_rank
        if is_rank:
            self._is_ready.wait(_CONNECT_TIMEOUT)
        if self._store is not None:
            self.join(_CONNECT_TIMEOUT)
        if not is_rank:
            # One that this process has made would keep the port.
            self._store = None

    def run(self) -> None:
        try:
            if not self.has_address:
                return
            store = self._connect()
            if self._is_wanted:
                self._store = store
            if self._is_looking:
                self._is_ready.set()
            # Before others use the store: a call of theirs that waits keeps it.
            self._look_for_peer(store)
            if self._is_wanted:
                store.set(_SURE, "1")
        except Exception as error:
            self._why_not = str(error).partition("\n")[0] or type(error).__name__
        finally:
            self._is_ready.set()

    def _connect(self) -> Any:
        # torchrun's agent has one.
        makes_it = self._launched.rank == 0 and not self._has_agent
        self._is_for_others = self._is_seen_from_others(is_here=makes_it)
        if not makes_it:
            self._wait_for_listener()
        self._why_not = "what listens there is no store of torch"
        from torch_testing_ext._torch import process_state

        store = process_state.launcher_store(self._host, int(self._port), makes_it, LONGEST_WAIT_FOR_IMPORTS)
        self._why_not = ""
        return store

    def _is_seen_from_others(self, is_here: bool) -> bool:
        """Does the address mean another machine than this one, or, if `is_here`, this one for others?"""
        addresses = {info[4][0] for info in socket.getaddrinfo(self._host, None, type=socket.SOCK_DGRAM)}
        return not variables.is_loopback(self._host) and any(map(_is_own, map(str, addresses))) == is_here

    def _wait_for_listener(self) -> None:
        """Wait until somebody listens: torch's own store prints long warnings until then."""
        while self._is_wanted:
            try:
                socket.create_connection((self._host, int(self._port)), _CONNECT_TIMEOUT).close()
                return
            except OSError as error:
                self._why_not = error.strerror or str(error)
            time.sleep(_PAUSE)
        raise NoStore(self._why_not)

    def _look_for_peer(self, store: Any) -> None:
        """Find another rank that is there now: what one has left that has gone stays in the store of a launcher.

        One rank is the first, and others answer it. It takes an answer for a peer, and then the launch is sure.
        """
        own = f"{self._launched.rank} {os.urandom(8).hex()}"
        first, silent, since = own, "", 0.0
        while self._is_looking and not self.has_peer:
            before, first = first, store.compare_set("first", silent, own).decode()
            if first != before:
                since = time.monotonic()
                # What this rank has left itself is no peer.
                if first.split()[0] != own.split()[0]:
                    store.set(f"answer to {first}", own)
            elif first != own and time.monotonic() - since > _LONGEST_SILENCE:
                silent = first
            self.has_peer = store.check([_SURE]) or store.check([f"answer to {own}"])
            time.sleep(_STEP)


def _is_own(address: str) -> bool:
    """Is this the address of an interface of this machine?"""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


@functools.cache
def _store_of(launched: Launched) -> StoreConnection:
    connection = StoreConnection(launched)
    connection.start()
    return connection


def store_of(launched: Launched) -> Any:
    """The store of a launch on several machines. Raises NoStore."""
    return _store_of(launched).store(LONGEST_WAIT_FOR_IMPORTS)


# -- what the user reads


def _names() -> list[tuple[str, str]]:
    """The variables of rank and size that this process has, of every launcher."""
    names = [(launcher.rank, launcher.world_size) for launcher in variables.LAUNCHERS if launcher.sign in os.environ]
    # A test or a conftest may have removed them meanwhile.
    return names or [("RANK", "WORLD_SIZE")]


def how_to_unset() -> str:
    """Say how to run the same command without the variables of this launch."""
    unset = " ".join(f"-u {name}" for pair in _names() for name in pair)
    return f"Unless a launcher has started this process, run: env {unset} {user_shell.command(*sys.orig_argv[1:])}"


def _as_set(launched: Launched) -> str:
    # A test may have changed their values.
    rank, size = _names()[0]
    return f"{rank}={launched.rank} and {size}={launched.world_size} are set as in a rank"


def _place(launched: Launched) -> str:
    return "" if launched.is_one_machine else _store_of(launched).describe()


def _explain_left_variables(launched: Launched) -> str:
    place = _place(launched)
    runs = f"answers{place}" if place else "is running"
    return f"{_as_set(launched)}, but no other rank of that launch {runs}. {how_to_unset()}"


def _explain_wait(launched: Launched) -> str:
    return (
        f"{_as_set(launched)}: this process waits up to {LONGEST_WAIT_FOR_IMPORTS:.0f} s for another rank"
        f"{_place(launched)}. {how_to_unset()}"
    )
