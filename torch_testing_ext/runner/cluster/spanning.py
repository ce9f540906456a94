"""A unit with ranks on several nodes: its main process is on the first, which judges the ranks of all.

The nodes do not speak with each other but through run_test.py; only the ranks do. If a node is lost, so is the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_testing_ext.launch.blocks import Room

from ..engine.place import LostUnitListener
from ..engine.running_unit import UnitHandle
from ..engine.unit_log import EndCause
from ..model import Attempt, Lease, Test, Unit
from .protocol import BlockIsGone, HoldBlock, RunUnit, TellUnit
from .remote import RemoteBlock, RemoteNode, RemoteUnit


class SpanningUnit(LostUnitListener):
    """A unit on several nodes while it runs. It is over when nothing of it is left on any."""

    def __init__(
        self,
        request: RunUnit,
        nodes: Sequence[RemoteNode],
        listener: LostUnitListener,
    ):
        """`request`: for the first of the nodes."""
        self.unit: Unit = request.unit
        self.lease: Lease = request.lease
        self.cause = EndCause.ITSELF
        self._listener = listener
        self._first = nodes[0]
        self._ended: tuple[list[Attempt], list[int]] | None = None  # on the first node
        self._why_lost = ""
        leased = sum(len(part.devices) for part in self.lease.parts)
        number, file = self.unit.number, self.unit.file
        self._blocks = [
            node.hold(HoldBlock(number, file, part, request.devices, request.together, leased), group, self)
            for group, (node, part) in enumerate(zip(nodes, self.lease.parts, strict=True))
            if group
        ]
        self._main: RemoteUnit = nodes[0].run(request, self, lambda group, line: self._blocks[group - 1].tell(line))

    # -- requests

    def end(self, cause: EndCause) -> None:
        """Escalate: SIGTERM, then SIGKILL. The ranks on other nodes end after their main process."""
        if self.cause is EndCause.ITSELF:
            self.cause = cause
            self._main.end(cause)

    def kill(self) -> None:
        self.cause = EndCause.INTERRUPTED
        self._main.kill()
        self._end_blocks(at_once=True)

    def ask_for_stacks(self, answer: Callable[[str], object]) -> None:
        self._main.ask_for_stacks(answer)

    @property
    def test(self) -> Test:
        """The test that is running, or is about to run."""
        return self._main.test

    @property
    def seconds(self) -> float:
        """How long the current test has been running."""
        return self._main.seconds

    def new_output(self) -> str:
        """The output since the last call."""
        texts = [self._main.new_output()]
        for block in self._blocks:
            texts += block.output
            block.output = []
        return "".join(texts)

    def abandon(self) -> list[Attempt]:
        """The results so far that were not handed out."""
        return self._ended[0] if self._ended is not None else []

    def _end_blocks(self, at_once: bool) -> None:
        for block in self._blocks:
            block.end(at_once)

    # -- from the first node

    def test_began(self, running: UnitHandle, test: Test) -> None:
        self._listener.test_began(self, test)

    def test_is_slow(self, running: UnitHandle, test: Test, seconds: float) -> None:
        self._listener.test_is_slow(self, test, seconds)

    def results(self, running: UnitHandle, attempts: list[Attempt]) -> None:
        self._listener.results(self, attempts)

    def unit_ended(self, running: UnitHandle, attempts: list[Attempt], rest: list[int]) -> None:
        self._ended = attempts, rest
        if self.cause is EndCause.ITSELF and not self._why_lost:
            self.cause = running.cause
        self._end_blocks(at_once=bool(self._why_lost))
        self._finish_if_over()

    def unit_lost(self, running: UnitHandle, rest: list[int], why: str) -> None:
        self._why_lost = self._why_lost or why
        self._ended = [], rest
        self._end_blocks(at_once=True)
        self._finish_if_over()

    # -- from the others

    def block_said(self, block: RemoteBlock, line: str) -> None:
        self._first.send(TellUnit(self.unit.number, block.group, line, block.node.ahead_of(self._first)))

    def block_ended(self, block: RemoteBlock, why: str) -> None:
        if self._ended is None:
            self._first.send(BlockIsGone(self.unit.number, block.group, why))
        self._finish_if_over()

    def block_lost(self, block: RemoteBlock, why: str) -> None:
        """The node is lost: so is the unit, unless it had ended and only its processes were still to go."""
        if self._ended is None:
            self._why_lost = self._why_lost or why
            self._main.kill()
            self._end_blocks(at_once=True)
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if self._ended is None or not all(block.is_over for block in self._blocks):
            return
        attempts, rest = self._ended
        if not self._why_lost:
            self._listener.unit_ended(self, attempts, rest)
            return
        self._listener.results(self, attempts)
        self._listener.unit_lost(self, self._main.without_result, self._why_lost)


def rooms_of(lease: Lease, addresses: Callable[[str], str]) -> tuple[Room, ...]:
    """How many ranks each node of a lease has room for."""
    return tuple(Room(part.node, len(part.devices or part.slots), addresses(part.node)) for part in lease.parts)
