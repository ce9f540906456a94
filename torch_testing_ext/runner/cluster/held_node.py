"""A node of a Ray cluster of which a run holds a part."""

from __future__ import annotations

import re
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext._machine.device_masks import all_masks
from torch_testing_ext._process.channels import socket_pair

from . import node_supervisor, ray_actor
from .bridge_messages import Connect, NodeJoined
from .node_choice import HeldState, Room, SeenNode

# An actor that has not started by then is given up, and tried again.
PENDING_TIMEOUT = 20.0
# An actor that does not answer a poll is lost.
HELD_NODE_ANSWER_TIMEOUT = 15.0
HELD_NODE_END_TIMEOUT = 4.0
# Seconds after which an actor is told that it is still needed.
KEEP_INTERVAL = 3.0
_OF_ACTORS = ("ActorDiedError", "ActorUnavailableError", "NodeDiedError")
OF_NODES = (*_OF_ACTORS, "OutOfMemoryError", "GetTimeoutError")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class UnfitNode(Exception):
    """A node on which something that has to start fails, and would fail again."""


class ProjectStore:
    """The project in Ray's object store, as soon as a node needs it."""

    def __init__(self, ray: Any, archive: str):
        self._ray = ray
        self._archive = archive
        self.key = ray_actor.key_of(Path(archive).read_bytes()) if archive else ""
        self._stored: Any = None
        self._storing = threading.Lock()

    def for_node(self, actor: Any) -> Any:
        """The project for a node, unless the node has kept it."""
        if not self.key or self._ray.get(actor.has.remote(self.key)):
            return None
        # Once, in the threads of all nodes.
        with self._storing:
            if self._stored is None:
                self._stored = self._ray.put(Path(self._archive).read_bytes())
        return self._stored


@dataclass(frozen=True)
class Ground:
    """The things that all nodes of a run have in common."""

    ray: Any
    request: Connect
    actor_class: Any
    project: ProjectStore
    # A message and descriptors to the runner.
    send: Callable[..., None]


class HeldNode:
    """A node and its agent. Its threads may call `end` at any time."""

    def __init__(self, ground: Ground, seen: SeenNode, room: Room, serial: int):
        """Ask Ray for the room, which `is_reserved` waits for."""
        self.seen = seen
        self.serial = serial
        self.state = HeldState.RESERVES
        self._ground = ground
        self._room = room
        bundle = {"CPU": float(room.cpus)}
        if room.gpus:
            bundle["GPU"] = float(room.gpus)
        if seen.pin:
            bundle[seen.pin] = 0.001
        self._group: Any = ground.ray.util.placement_group([bundle], strategy="STRICT_PACK")
        self._actor: Any = None
        self._stream: socket.socket | None = None
        self._ending = threading.Lock()

    def is_reserved(self, seconds: float) -> bool:
        return bool(self._group.wait(seconds))

    def serve(self) -> None:
        """Start the agent and copy its bytes, until it ends or `end` is called. Raises an exception that says how."""
        try:
            if self._start():
                self._copy_from()
        except Exception:
            # Nobody here has ended it.
            if self.state in (HeldState.STARTS, HeldState.JOINED):
                raise

    def _advance(self, to: HeldState) -> bool:
        """Reach a state, unless the node is being ended."""
        with self._ending:
            if self.state in (HeldState.ENDS, HeldState.GONE):
                return False
            self.state = to
            return True

    def _start(self) -> bool:
        """Start the actor, and have it start the agent. Returns whether the node has joined."""
        ray = self._ground.ray
        request = self._ground.request
        if not self._advance(HeldState.STARTS):
            return False
        actor_class = self._ground.actor_class.options(
            num_cpus=self._room.cpus,
            num_gpus=self._room.gpus,
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, 0),
        )
        agent = ["-m", "torch_testing_ext.runner.cluster.agent", "--die-with-parent"]
        masks = sorted(all_masks())
        self._actor = actor_class.remote(Path(node_supervisor.__file__).read_text(encoding="utf-8"), agent, masks)
        try:
            ray.get(self._actor.pid.remote(), timeout=PENDING_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            # Another look tries it again.
            return False
        facts = ray.get(
            self._actor.start.remote(
                self._ground.project.for_node(self._actor),
                self._ground.project.key,
                request.root,
                request.digest,
                request.setup,
                dict(request.environ),
                list(request.path),
                dict(request.times),
            )
        )
        if "error" in facts:
            raise UnfitNode(str(facts["error"]))
        return self._join(facts)

    def _join(self, facts: dict[str, Any]) -> bool:
        """Give the runner the stream of the agent. Returns whether the node has joined."""
        self._stream, theirs = socket_pair()
        with theirs:
            if not self._advance(HeldState.JOINED):
                return False
            joined = NodeJoined(
                self.seen.name,
                self.serial,
                str(facts["root"]),
                self._room.cpus,
                tuple(facts["gpus"]),
                tuple(facts["warnings"]),
            )
            self._ground.send(joined, theirs.fileno())
        threading.Thread(target=self._copy_to, args=(self._stream,), daemon=True).start()
        return True

    # -- the bytes

    def _copy_from(self) -> None:
        """Copy what the agent says, until it ends. Raises how it ended, unless the runner has ended it."""
        ray = self._ground.ray
        while (data := ray.get(self._actor.receive.remote(1.0), timeout=HELD_NODE_ANSWER_TIMEOUT)) is not None:
            if not self._pass_on(data) or self.state is not HeldState.JOINED:
                return
        raise EOFError(str(ray.get(self._actor.how_it_ended.remote(), timeout=HELD_NODE_ANSWER_TIMEOUT)))

    def _pass_on(self, data: bytes) -> bool:
        """Pass bytes to the runner, which may be slow or stopped. Returns False if it has closed the stream."""
        assert self._stream is not None
        view = memoryview(data)
        while view:
            try:
                _, writable, _ = select.select([], [self._stream], [], KEEP_INTERVAL)
                if writable:
                    sent = self._stream.send(view, socket.MSG_DONTWAIT)
                    view = view[sent:]
                else:
                    self._ground.ray.get(self._actor.keep.remote(), timeout=HELD_NODE_ANSWER_TIMEOUT)
            except BlockingIOError:
                # There is less room than select has said.
                continue
            except (OSError, ValueError):
                return False
        return True

    def _copy_to(self, stream: socket.socket) -> None:
        """Copy what the runner says: one call at a time, since calls to a threaded actor may overtake each other."""
        # Whatever it is, the other direction finds it out.
        with suppress(Exception):
            while data := stream.recv(ray_actor.CHUNK):
                self._ground.ray.get(self._actor.send.remote(data), timeout=HELD_NODE_ANSWER_TIMEOUT)
            self.end()

    # -- the end

    def end(self) -> None:
        """End the agent in order, and give back the node."""
        if not self._advance(HeldState.ENDS):
            return
        if self._actor is not None:
            with suppress(Exception):
                self._ground.ray.get(self._actor.stop.remote(), timeout=HELD_NODE_END_TIMEOUT)
        self.kill()
        with suppress(Exception):
            self._ground.ray.util.remove_placement_group(self._group)
        self.state = HeldState.GONE

    def kill(self) -> None:
        if self._actor is not None:
            with suppress(Exception):
                self._ground.ray.kill(self._actor)

    def close_stream(self) -> None:
        if self._stream is not None:
            with suppress(OSError):
                # Closing alone ends nothing while another thread reads.
                self._stream.shutdown(socket.SHUT_RDWR)
            self._stream.close()


def describe_error(error: Exception) -> str:
    """An exception of Ray, in words."""
    cause = getattr(error, "cause", None)
    # What a call of the actor has raised, such as that its argument has no room there.
    if isinstance(cause, Exception):
        return describe_error(cause)
    lines = (line.strip() for line in _COLOURS.sub("", str(error)).splitlines())
    first = next((line for line in lines if line), "")
    match type(error).__name__:
        case "UnfitNode" | "EOFError":
            return str(error)
        case "OutOfMemoryError":
            return "Ray ended its actor, because the node is out of memory"
        case "ObjectStoreFullError" | "OutOfDiskError":
            return "the object store of Ray has no room for the project: use cluster.root, or start Ray with more"
        case "GetTimeoutError":
            return f"its actor has not answered for {HELD_NODE_ANSWER_TIMEOUT:.0f} s"
        case "ConnectionError" if "any running Ray instance" in first:
            return "none runs on this machine, and RAY_ADDRESS names none"
        case name if name in _OF_ACTORS:
            return f"Ray says that its actor has died or cannot be reached ({name})"
        case name:
            return f"{name}: {first}"
