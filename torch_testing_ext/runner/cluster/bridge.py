"""The bridge: the one process that imports ray. It holds the nodes of a cluster and copies bytes to and from agents.

Ray prints what it likes into the bridge's output, which is a file. The bridge has a session of its own, so that Ctrl-C
does not reach it. When run_test.py ends it ends, and Ray ends the actors that it owns.
"""

from __future__ import annotations

import itertools
import os
import re
import select
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._machine.visible_devices import MASKS
from torch_testing_ext._process import system
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.loop import wait_readable
from torch_testing_ext._process.messages import unexpected

from . import ray_actor
from .bridge_protocol import (
    BridgeWaits,
    CannotConnect,
    Connect,
    NodeDrains,
    NodeGone,
    NodeJoined,
    RayImported,
    ReleaseNode,
    ToBridge,
)

POLL = 1.0  # seconds between two looks at the nodes of the cluster
PROBE_TIMEOUT = 5.0
PENDING_TIMEOUT = 20.0  # an actor that has not started by then lost a race for its resources
ANSWER_TIMEOUT = 15.0  # an actor that does not answer a poll is lost
END_TIMEOUT = 4.0
KEEP_INTERVAL = 3.0  # seconds after which an actor is told that it is still needed
MOST_LOSSES = 2  # how often an agent may be lost on a node before the node is left alone
_CLIENT = "ray://"
_OF_ACTORS = ("ActorDiedError", "ActorUnavailableError", "NodeDiedError")
_OF_NODES = (*_OF_ACTORS, "OutOfMemoryError", "GetTimeoutError")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


@dataclass
class _Held:
    """A node of the cluster on which an agent runs or starts."""

    name: str
    node_id: str
    serial: int
    cpus: int
    gpus: int
    actor: Any = None
    joined: bool = False
    stream: socket.socket | None = None
    over: threading.Event = field(default_factory=threading.Event)


class Bridge:
    """Starts agents on the nodes of a cluster as they become free."""

    def __init__(self, channel: Channel[ToBridge], request: Connect, ray: Any):
        self._channel = channel
        self._request = request
        self._ray = ray
        self._sending = threading.Lock()
        self._held: dict[str, _Held] = {}  # by the node's id
        self._losses: dict[str, int] = {}
        self._last_loss = ""
        self._any_joined = False
        self._serials = itertools.count()
        self._names: dict[str, str] = {}
        self._drained: set[str] = set()
        self._told: str | None = None
        self._key = ""  # of the archive
        self._archive: Any = None  # in Ray's object store, as soon as a node needs it
        self._archiving = threading.Lock()
        self._actor_class: Any = None

    def send(self, message: Any, *fds: int) -> None:
        with self._sending:
            self._channel.send(message, *fds)

    def connect(self) -> None:
        """Connect to the cluster. Raises any exception of Ray."""
        address, options = self._request.address, {}
        host = address.removeprefix(_CLIENT).rpartition(":")[0]
        if host.startswith("127.") and not address.startswith(_CLIENT):
            options["_node_ip_address"] = host  # else Ray takes another address of this machine, and waits for minutes
        self._ray.init(address=address, log_to_driver=False, **options)
        self._ray.cloudpickle.register_pickle_by_value(ray_actor)
        self._actor_class = self._ray.remote(ray_actor.AgentActor)
        if self._request.archive:
            self._key = ray_actor.key_of(Path(self._request.archive).read_bytes())

    def serve(self) -> None:
        """Work until run_test.py closes the channel."""
        while True:
            self._look()
            until = time.monotonic() + POLL
            while wait_readable(self._channel, until):
                try:
                    messages = self._channel.receive()
                except EOFError:
                    return
                for message in messages:
                    self._on_message(message)

    def _on_message(self, message: ToBridge) -> None:
        match message:
            case ReleaseNode(serial):
                for held in [held for held in self._held.values() if held.serial == serial]:
                    threading.Thread(target=self._end, args=(held,), daemon=True).start()
            case Connect():
                raise AssertionError("a second Connect")
            case _:
                unexpected(message)

    # -- nodes

    def _look(self) -> None:
        """Start agents on nodes that have something free, and say what is missing."""
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        self._name(nodes)
        draining = self._draining()
        for held in list(self._held.values()):
            if held.node_id in draining and held.node_id not in self._drained:
                self._drained.add(held.node_id)
                self.send(NodeDrains(held.name))
        if why := self._infeasible(nodes) or self._hopeless(nodes):
            self.send(CannotConnect(why))
            return
        free = self._free(nodes)
        for node_id in sorted(free, key=lambda one: (-free[one].get("GPU", 0.0), -free[one].get("CPU", 0.0))):
            if self._is_wanted(node_id) and node_id not in draining:
                self._hold(node_id, free[node_id])
        self._tell(self._waits_for(nodes))

    def _draining(self) -> set[str]:
        try:
            from ray._private import state

            return set(state.state.get_draining_nodes())
        except Exception:  # a private name, which another version may lack: such nodes are lost without notice
            return set()

    def _free(self, nodes: dict[str, Any]) -> dict[str, dict[str, float]]:
        """The free resources of each node; in a version of Ray that does not say, all resources."""
        try:
            from ray._private import state

            untyped: Any = state
            known = untyped.available_resources_per_node()
        except Exception:
            known = {}
        return {node_id: known.get(node_id, node["Resources"]) for node_id, node in nodes.items()}

    def _is_wanted(self, node_id: str) -> bool:
        enough = self._request.nodes is not None and len(self._held) >= self._request.nodes
        return node_id not in self._held and not enough and self._losses.get(node_id, 0) < MOST_LOSSES

    def _hold(self, node_id: str, free: dict[str, float]) -> None:
        cpus, gpus = int(free.get("CPU", 0.0)), int(free.get("GPU", 0.0))
        wanted = self._request.gpus_per_node
        if wanted is not None:
            if gpus < wanted:
                return
            gpus = wanted
        if not cpus:
            return
        held = _Held(self._names[node_id], node_id, next(self._serials), cpus, gpus)
        self._held[node_id] = held
        threading.Thread(target=self._serve_node, args=(held,), daemon=True).start()

    def _name(self, nodes: dict[str, Any]) -> None:
        """Name nodes by their host, or by address if hosts share names, as in a cluster pretended on one machine."""
        hosts = [node["NodeManagerHostname"] for node in nodes.values()]
        addresses = [node["NodeManagerAddress"] for node in nodes.values()]
        for node_id, node in nodes.items():
            host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
            if node_id not in self._names:
                name = host if hosts.count(host) == 1 else address
                if (name == address and addresses.count(address) > 1) or name in self._names.values():
                    name = f"{name}-{node_id[:6]}"
                self._names[node_id] = name

    def _infeasible(self, nodes: dict[str, Any]) -> str:
        """Why no node of the cluster will ever do; empty if one may."""
        wanted = self._request.gpus_per_node or 0
        totals = {
            self._names[one]: (int(node["Resources"].get("GPU", 0)), int(node["Resources"].get("CPU", 0)))
            for one, node in nodes.items()
        }
        if self._held or any(gpus >= wanted and cpus for gpus, cpus in totals.values()):
            return ""
        has = "; ".join(f"{name} has {gpus} GPUs and {cpus} CPUs" for name, (gpus, cpus) in sorted(totals.items()))
        needs = f"{wanted} GPUs and a CPU" if wanted else "a CPU"
        return f"no node of the cluster at {self._request.address} has {needs} (INFEASIBLE): {has}"

    def _hopeless(self, nodes: dict[str, Any]) -> str:
        """Why the run cannot begin on any of the nodes, of which each was lost repeatedly; empty if it may."""
        tried = nodes and all(self._losses.get(one, 0) >= MOST_LOSSES for one in nodes)
        if self._any_joined or self._held or not tried:
            return ""
        return f"no agent can start on any node of the cluster at {self._request.address}: {self._last_loss}"

    def _waits_for(self, nodes: dict[str, Any]) -> str:
        if self._request.nodes is not None and len(self._held) < self._request.nodes:
            return (
                f"{self._request.nodes} nodes (--cluster-nodes), of which {len(self._held)} are free; the cluster has "
                f"{len(nodes)}"
            )
        starting = sorted(held.name for held in self._held.values() if not held.joined)
        if starting:
            return f"agents that start on {', '.join(starting)}"
        if not self._held:
            wanted = self._request.gpus_per_node
            what = f"{wanted} GPUs and a CPU" if wanted else "a CPU"
            return f"{what} on one of {len(nodes)} nodes, which others use"
        return ""

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self.send(BridgeWaits(text))

    # -- one node, in a thread of its own

    def _serve_node(self, held: _Held) -> None:
        is_node = False
        try:
            why = self._start(held) or (self._copy_from(held) if held.joined else "")
        except Exception as error:
            why, is_node = describe(error), type(error).__name__ in _OF_NODES
        if why:
            self._last_loss = f"node {held.name}: {why}"
            self._losses[held.node_id] = self._losses.get(held.node_id, 0) + 1
            self.send(NodeGone(held.name, why, is_node))
        if held.stream is not None:
            with suppress(OSError):
                held.stream.shutdown(socket.SHUT_RDWR)  # closing alone ends nothing while another thread reads
        self._end(held)
        held.over.set()
        if held.stream is not None:
            held.stream.close()
        self._held.pop(held.node_id, None)

    def _start(self, held: _Held) -> str:
        """Start the agent. Returns why it cannot start, or nothing."""
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(held.node_id, soft=False)
        masks = sorted({name for names in MASKS.values() for name in names})
        held.actor = self._actor_class.options(
            num_cpus=held.cpus,
            num_gpus=held.gpus,
            scheduling_strategy=strategy,
            max_restarts=0,
            max_concurrency=8,
        ).remote(["-m", "torch_testing_ext.runner.agent", "--die-with-parent"], masks)
        try:
            self._ray.get(held.actor.pid.remote(), timeout=PENDING_TIMEOUT)
        except self._ray.exceptions.GetTimeoutError:
            return ""  # somebody else was faster; another look shows what is free then
        request = self._request
        facts = self._ray.get(
            held.actor.start.remote(
                self._archive_for(held.actor),
                self._key,
                request.root,
                request.digest,
                request.setup,
                dict(request.environ),
                request.on_path,
            )
        )
        if "error" in facts:
            return str(facts["error"])
        held.stream, theirs = socket_pair()
        with theirs:
            held.joined = self._any_joined = True
            self.send(
                NodeJoined(held.name, held.serial, str(facts["root"]), held.cpus, tuple(facts["gpus"])),
                theirs.fileno(),
            )
        threading.Thread(target=self._copy_to, args=(held, held.stream), daemon=True).start()
        return ""

    def _archive_for(self, actor: Any) -> Any:
        """The project for a node, unless the node has kept it."""
        if not self._key or self._ray.get(actor.has.remote(self._key)):
            return None
        with self._archiving:  # once, in the threads of all nodes
            if self._archive is None:
                self._archive = self._ray.put(Path(self._request.archive).read_bytes())
        return self._archive

    def _copy_from(self, held: _Held) -> str:
        """Copy what the agent says, until it ends. Returns how it ended; nothing if run_test.py has ended it."""
        assert held.stream is not None
        while (data := self._ray.get(held.actor.receive.remote(1.0), timeout=ANSWER_TIMEOUT)) is not None:
            if not self._pass_on(held, held.stream, data):
                return ""
            if held.over.is_set():
                return ""
        return str(self._ray.get(held.actor.how_it_ended.remote(), timeout=ANSWER_TIMEOUT))

    def _pass_on(self, held: _Held, stream: socket.socket, data: bytes) -> bool:
        """Pass bytes to run_test.py, which may be slow or stopped. Returns False if it has closed the stream."""
        view = memoryview(data)
        try:
            while view:
                if select.select([], [stream], [], KEEP_INTERVAL)[1]:
                    view = view[stream.send(view, socket.MSG_DONTWAIT) :]
                else:
                    self._ray.get(held.actor.keep.remote(), timeout=ANSWER_TIMEOUT)
        except BlockingIOError:
            return self._pass_on(held, stream, bytes(view))
        except (OSError, ValueError):
            return False
        return True

    def _copy_to(self, held: _Held, stream: socket.socket) -> None:
        """Copy what run_test.py says: one call at a time, since calls to a threaded actor may overtake each other."""
        with suppress(Exception):  # whatever it is, the other direction finds it out
            while data := stream.recv(ray_actor.CHUNK):
                self._ray.get(held.actor.send.remote(data), timeout=ANSWER_TIMEOUT)
        held.over.set()
        self._end(held)

    def _end(self, held: _Held) -> None:
        """End the agent in order, and give back the node."""
        actor, held.actor = held.actor, None if held.over.is_set() else held.actor
        if actor is None:
            return
        with suppress(Exception):
            self._ray.get(actor.stop.remote(), timeout=END_TIMEOUT)
        self.kill(actor)

    def kill(self, actor: Any) -> None:
        with suppress(Exception):
            self._ray.kill(actor)

    def close(self) -> None:
        """End all agents in order."""
        held = list(self._held.values())
        threads = [threading.Thread(target=self._end, args=(one,), daemon=True) for one in held]
        for one, thread in zip(held, threads, strict=True):
            one.over.set()
            thread.start()
        for thread in threads:
            thread.join(END_TIMEOUT)

    def kill_all(self) -> None:
        for held in list(self._held.values()):
            if held.actor is not None:
                self.kill(held.actor)


def describe(error: Exception) -> str:
    """An exception of Ray, in words."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # what a call of the actor has raised, such as that its argument has no room there
        return describe(cause)
    lines = (line.strip() for line in _COLOURS.sub("", str(error)).splitlines())
    first = next((line for line in lines if line), "")
    match type(error).__name__:
        case "OutOfMemoryError":
            return "Ray ended its actor, because the node is out of memory"
        case "ObjectStoreFullError" | "OutOfDiskError":
            return "the object store of Ray has no room for the project: use --cluster-root, or start Ray with more"
        case "GetTimeoutError":
            return f"its actor has not answered for {ANSWER_TIMEOUT:.0f} s"
        case "ConnectionError" if "any running Ray instance" in first:
            return "none runs on this machine, and RAY_ADDRESS names none"
        case name if name in _OF_ACTORS:
            return f"Ray says that its actor has died or cannot be reached ({name})"
        case name:
            return f"{name}: {first}"


def probe(address: str) -> str:
    """Why nothing can be a cluster at this address; empty if something listens there."""
    if address == "auto":
        return ""
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    try:
        socket.create_connection((host, int(port)), PROBE_TIMEOUT).close()
    except OSError as error:
        return f"no Ray cluster answers at {address}: a connection to {host}, port {port} failed: {error}"
    return ""


def main() -> NoReturn:
    """`python -m torch_testing_ext.runner.cluster.bridge CHANNEL PARENT`."""
    system.die_with(int(sys.argv[2]), signal.SIGTERM)
    channel: Channel[ToBridge] = Channel.on(int(sys.argv[1]), ToBridge)
    received: list[ToBridge] = []
    while not received:
        try:
            received += channel.receive()
        except EOFError:
            os._exit(0)
    (request,) = received
    assert isinstance(request, Connect)
    if why := probe(request.address):
        channel.send(CannotConnect(why))
        os._exit(0)
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        channel.send(CannotConnect(f"ray cannot be imported: {error}"))
        os._exit(0)
    channel.send(RayImported())
    bridge = Bridge(channel, request, ray)

    def on_sigterm(*_: object) -> None:
        """run_test.py was killed: the agents end with their actors, and those with this process or at once."""
        threading.Timer(1.5, os._exit, (0,)).start()
        shutil.rmtree(request.folder, ignore_errors=True)
        if request.address.startswith(_CLIENT):
            bridge.kill_all()
        os._exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        bridge.connect()
    except Exception as error:
        channel.send(CannotConnect(f"no connection to the Ray cluster at {request.address}: {describe(error)}"))
        os._exit(0)
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put a handler of its own there
    try:
        bridge.serve()
    except Exception as error:
        bridge.send(CannotConnect(f"the Ray cluster at {request.address} is gone: {describe(error)}"))
    threading.Timer(2 * END_TIMEOUT, os._exit, (0,)).start()
    bridge.close()
    with suppress(Exception):
        ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
