"""A rank that waits for its peers and for nothing else, known by two probes of its threads.

This is point 3 of the theorem in `proof`: no thread of the rank that may issue a call can go on, unless one of its
calls ends. A wait that another thread, a timer or another kind of peer may end is not proof: it only raises suspicion.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_testing_ext._torch.signs import native_threads

_FUTEX = {"x86_64": "202", "aarch64": "98"}
# FUTEX_WAIT, FUTEX_WAIT_BITSET.
_FUTEX_WAITS = (0, 9)
_FUTEX_COMMAND = 0x7F
# Other processes cannot end the wait.
_FUTEX_PRIVATE = 0x80


@dataclass(frozen=True)
class ThreadState:
    """A native thread as the kernel shows it. `ran`: the time that it has spent running, to compare two probes."""

    number: int
    name: str
    state: str
    syscall: str
    ran: str


@dataclass(frozen=True)
class PythonThread:
    """A thread that runs Python, besides the main one. `number`: that of its native thread, 0 if unknown.

    `can_act`: it may issue a collective, as far as can be seen; `in_torch`: it is in a call of torch, or in a `wait()`;
    `in_loop`: it waits in a loop that nothing but another thread of its process wakes.
    """

    number: int
    text: str
    can_act: bool
    in_torch: bool
    in_loop: bool = False


@dataclass(frozen=True)
class RankState:
    """The threads of a rank at a moment.

    `frames` are those of the main thread, innermost first, and `calls` is the method that the innermost one calls, if
    it calls one. `others` are the further threads that run Python, `p2p` says whether point-to-point operations have
    been issued, `timers` whether a signal may interrupt the main thread, and `children` whether the rank has started
    processes. `for_work`: the main thread is known to wait for a work, with no other time-out than that of its group.
    `at_store`: it waits at a store, for a key or while it makes a group, for at most so many seconds. `keys`: those
    keys in words, as far as they are known. `in_collective`: it waits for the work of a collective. `message`: the
    message whose work it waits for, by its number among the messages; the parent makes that its order among all calls.
    `in_loop`: it waits in an event loop that nothing but a thread of its process wakes.
    """

    machine: str
    main: int
    threads: tuple[ThreadState, ...]
    frames: tuple[tuple[str, int, str], ...]
    in_torch: bool
    calls: str
    others: tuple[PythonThread, ...]
    p2p: bool
    timers: bool
    children: bool = False
    for_work: bool = False
    at_store: float | None = None
    keys: tuple[str, ...] = ()
    in_collective: bool = False
    message: int | None = None
    in_loop: bool = False

    @property
    def has_thread_in_torch(self) -> bool:
        """Whether another thread than the main one is in a call of torch."""
        return any(thread.in_torch for thread in self.others)

    @property
    def waits_at_store(self) -> bool:
        """Whether the main thread waits at a store. Such a wait looks again and again, or reads from a connection."""
        call = next((thread.syscall for thread in self.threads if thread.number == self.main), "")
        return self.at_store is not None and call.split()[:1] != [_FUTEX.get(self.machine)]

    @property
    def waits_in_own_process(self) -> bool:
        """Whether the main thread waits without end, and not in torch: for a lock, or for another thread."""
        main = next((thread for thread in self.threads if thread.number == self.main), None)
        is_in_torch = self.in_torch or self.for_work or self.calls == "wait"
        if main is None or is_in_torch:
            return False
        return self.in_loop or _waits_without_end(main, self.machine, may_be_timed=False)


def why_not_blocked(first: RankState | None, second: RankState | None) -> str | None:
    """Say why a rank is not known to wait in torch for ever, from two probes; None if it is."""
    if first is None or second is None:
        return "it did not say what it does"
    probes = _Probes(first, second)
    reasons = (
        probes.native_thread_that_runs,
        probes.python_thread_that_may_act,
        probes.signal_that_may_come,
        probes.main_thread_that_has_moved,
        probes.wait_outside_of_torch,
        probes.message_that_is_not_recorded,
    )
    for reason in reasons:
        text = reason()
        if text is not None:
            return text
    return None


class _Probes:
    """The states of a rank at two probes. Each method is a reason for which the rank may go on, or None."""

    def __init__(self, first: RankState, second: RankState):
        self.first = first
        self.second = second
        self.earlier = {thread.number: thread for thread in first.threads}
        # The further threads that run Python and do not wait for others of this process without end.
        asleep = self._asleep()
        self.awake = [thread for thread in second.others if thread.number not in asleep]

    def _asleep(self) -> set[int]:
        """The threads that have slept without end at both probes."""
        numbers = set()
        in_loops = {thread.number for thread in self.second.others if thread.in_loop}
        for thread in self.second.threads:
            is_unchanged = self.earlier.get(thread.number) == thread
            is_endless = thread.number in in_loops or _waits_without_end(
                thread, self.second.machine, may_be_timed=False
            )
            if is_unchanged and is_endless:
                numbers.add(thread.number)
        return numbers

    def native_thread_that_runs(self) -> str | None:
        """A thread, the main one or one without Python, that does not sleep until others of this process wake it."""
        of_python = {thread.number for thread in self.second.others}
        for thread in self.second.threads:
            is_main = thread.number == self.second.main
            if thread.number in of_python or self._is_harmless(thread):
                continue
            if self.earlier.get(thread.number) != thread:
                return "one of its threads is running"
            if is_main and self.second.in_loop:
                continue
            may_be_timed = is_main and self.second.for_work
            if not _waits_without_end(thread, self.second.machine, may_be_timed):
                return f"{'it' if is_main else 'one of its threads'} waits for something else"
        return None

    def _is_harmless(self, thread: ThreadState) -> bool:
        """Whether a thread may run, since it only serves, or looks at a store again and again."""
        if thread.number == self.second.main:
            return self.second.waits_at_store and thread.state == "S"
        machine = self.second.machine
        return _serves(self.earlier.get(thread.number), machine) or _serves(thread, machine)

    def python_thread_that_may_act(self) -> str | None:
        """A thread that may issue a call, and is awake or may be woken by one that is."""
        could_act = {thread.number for thread in self.first.others if thread.can_act}
        for thread in self.second.others:
            may_act = thread.can_act or thread.number in could_act
            may_be_woken = bool(self.awake) and not thread.in_torch
            if may_act and (thread in self.awake or may_be_woken):
                return f"its {thread.text} may issue collectives"
        return None

    def signal_that_may_come(self) -> str | None:
        return "a signal may wake it" if self.second.timers else None

    def main_thread_that_has_moved(self) -> str | None:
        return "it has moved on" if self.first.frames != self.second.frames else None

    def wait_outside_of_torch(self) -> str | None:
        """The main thread may wait for another thread, as one that waits in torch; then nothing else may wake it."""
        second = self.second
        if second.for_work or second.in_torch or second.calls == "wait" or second.waits_at_store:
            return None
        if self.awake:
            return f"its {self.awake[0].text} may wake it"
        if second.children:
            return "a process that it has started may wake it"
        return None

    def message_that_is_not_recorded(self) -> str | None:
        """A send or receive that was not noted: its end is not known, as that of a collective is."""
        may_be_awaited = any(thread.can_act and thread.in_torch for thread in self.second.others)
        if not self.second.p2p or (self.second.in_collective and not may_be_awaited):
            return None
        return "it has sent or received, which is not recorded"


def _serves(thread: ThreadState | None, machine: str) -> bool:
    """Whether this thread matters only through the collectives which it completes."""
    return thread is not None and native_threads.serves(thread.name, thread.syscall, machine)


def _waits_without_end(thread: ThreadState, machine: str, may_be_timed: bool) -> bool:
    """Whether the thread is asleep in a futex of this process, without a time-out unless it may have one."""
    number, *arguments = thread.syscall.split() or [""]
    if thread.state != "S" or number != _FUTEX.get(machine) or len(arguments) < 4:
        return False
    operation = int(arguments[1], 16)
    is_wait = operation & _FUTEX_COMMAND in _FUTEX_WAITS
    is_private = bool(operation & _FUTEX_PRIVATE)
    has_timeout = int(arguments[3], 16) != 0
    return is_wait and is_private and (may_be_timed or not has_timeout)
