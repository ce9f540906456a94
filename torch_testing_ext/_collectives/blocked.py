"""Whether a rank waits for its peers and for nothing else, from two probes of its threads.

A wait that another thread, a timer or another kind of peer may end is not proof: it only raises suspicion.
"""

from __future__ import annotations

from dataclasses import dataclass

# Threads of gloo that serve connections and execute collectives, and those of a TCPStore's server. They wake up all the
# time, or wait with a time-out of the group, or for other ranks: they matter only through the collectives that gloo's
# complete.
_SERVING_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "pt_tcpstore")

# The loop of a connection has no name of its own in torch 2.11: it takes at most 64 events, and waits 10 ms for them.
_EPOLL_WAIT = {"x86_64": "232", "aarch64": "22"}
_OF_A_LOOP = (64, 10)

_FUTEX = {"x86_64": "202", "aarch64": "98"}
_FUTEX_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
_FUTEX_COMMAND = 0x7F
_FUTEX_PRIVATE = 0x80  # other processes cannot end the wait


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

    `can_act`: it may issue a collective, as far as can be seen; `in_torch`: it is in a call of torch, or in a `wait()`.
    """

    number: int
    text: str
    can_act: bool
    in_torch: bool


@dataclass(frozen=True)
class RankState:
    """The threads of a rank at a moment.

    `frames` are those of the main thread, innermost first, and `calls` is the method that the innermost one calls, if
    it calls one. `others` are the further threads that run Python, `p2p` says whether point-to-point operations have
    been issued, `timers` whether a signal may interrupt the main thread, and `children` whether the rank has started
    processes. `for_work`: the main thread is known to wait for a work, with no other time-out than that of its group.
    `at_store`: it waits at a store, for a key or while it makes a group, for at most so many seconds.
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

    @property
    def waits_at_store(self) -> bool:
        """Does the main thread wait at a store? Such a wait looks again and again, or reads from a connection."""
        call = next((thread.syscall for thread in self.threads if thread.number == self.main), "")
        return self.at_store is not None and call.split()[:1] != [_FUTEX.get(self.machine)]


def why_not_blocked(first: RankState | None, second: RankState | None) -> str | None:
    """Say why a rank is not known to wait in torch for ever, from two probes; None if it is."""
    if first is None or second is None:
        return "it did not say what it does"
    earlier = {thread.number: thread for thread in first.threads}
    of_python = {one.number for one in second.others}
    for thread in second.threads:
        before = earlier.get(thread.number)
        if thread.number != second.main and any(_serves(one, second.machine) for one in (before, thread)):
            continue
        if thread.number in of_python:
            continue
        if thread.number == second.main and second.waits_at_store and thread.state == "S":
            continue  # it looks again and again
        if before != thread:
            return "one of its threads is running"
        may_be_timed = thread.number == second.main and second.for_work
        if not _waits_without_end(thread, second.machine, may_be_timed):
            what = "it" if thread.number == second.main else "one of its threads"
            return f"{what} waits for something else"
    awake = _awake(first, second)
    could_act = {one.number for one in first.others if one.can_act}
    for one in second.others:
        may_be_woken = one in awake or (bool(awake) and not one.in_torch)
        if may_be_woken and (one.can_act or one.number in could_act):
            return f"its {one.text} may issue collectives"
    if second.timers:
        return "a signal may wake it"
    if first.frames != second.frames:
        return "it has moved on"
    is_in_torch = second.for_work or second.in_torch or second.calls == "wait" or second.waits_at_store
    if not is_in_torch:
        # It may wait for another thread, which waits in torch.
        if not any(one.in_torch for one in second.others):
            return "it does not wait in torch"
        if awake:
            return f"its {awake[0].text} may wake it"
        if second.children:
            return "a process that it has started may wake it"
    if second.p2p:
        return "it has sent or received, which is not recorded"
    return None


def _awake(first: RankState, second: RankState) -> list[PythonThread]:
    """The threads that run Python and do not wait for others of this process without end."""
    earlier = {thread.number: thread for thread in first.threads}
    asleep = {
        thread.number
        for thread in second.threads
        if earlier.get(thread.number) == thread and _waits_without_end(thread, second.machine, may_be_timed=False)
    }
    return [one for one in second.others if one.number not in asleep]


def _serves(thread: ThreadState | None, machine: str) -> bool:
    """Is this a thread that matters only through the collectives which it completes?"""
    if thread is None:
        return False
    number, *arguments = thread.syscall.split() or [""]
    waits_for_events = number == _EPOLL_WAIT.get(machine) and len(arguments) >= 4
    is_loop = waits_for_events and tuple(int(one, 16) for one in arguments[2:4]) == _OF_A_LOOP
    return thread.name in _SERVING_THREADS or is_loop


def _waits_without_end(thread: ThreadState, machine: str, may_be_timed: bool) -> bool:
    """Is the thread asleep in a futex of this process, without a time-out unless it may have one?"""
    number, *arguments = thread.syscall.split() or [""]
    if thread.state != "S" or number != _FUTEX.get(machine) or len(arguments) < 4:
        return False
    operation, timeout = int(arguments[1], 16), int(arguments[3], 16)
    return (
        operation & _FUTEX_COMMAND in _FUTEX_WAITS
        and bool(operation & _FUTEX_PRIVATE)
        and (may_be_timed or timeout == 0)
    )
