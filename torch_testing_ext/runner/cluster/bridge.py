"""The process that imports ray: it holds the nodes of a cluster and copies bytes to and from agents.

Ray prints what it likes into the bridge's output, which is a file. The bridge has a session of its own, so that
Ctrl-C does not reach it. When the runner ends it ends, and Ray ends the actors that it owns.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from torch_testing_ext._process import private_folders, system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.event_loop import wait_readable
from torch_testing_ext._process.messages import unexpected

from . import bridge_messages, ray_actor
from .held_node import HELD_NODE_END_TIMEOUT, OF_NODES, Ground, HeldNode, ProjectStore, describe_error
from .node_choice import HeldState, Room, SeenNode, choose_nodes

# Seconds between two looks at the nodes of the cluster.
LOOK_AT_RAY = 1.0
PROBE_TIMEOUT = 5.0
CLEAN_TIMEOUT = 60.0
# A reservation that is pending then lost a race for its resources.
RESERVE_TIMEOUT = 2.0
# Seconds; random, so that two runs do not try again in lockstep.
RETRY_AFTER = (0.2, 2.0)
# The number of agents that a node may lose before it is left alone.
MOST_LOSSES = 2
_CLIENT = "ray://"


class Bridge:
    """Starts agents on the nodes of a cluster as they become free.

    `view`: looks at the nodes; `hold`: makes what holds one of them. Unless given, both ask Ray.
    """

    def __init__(
        self,
        channel: Channel[bridge_messages.ToBridge],
        request: bridge_messages.Connect,
        ray: Any,
        view: RayView | None = None,
        hold: Callable[[SeenNode, Room, int], HeldNode] | None = None,
    ):
        self._channel = channel
        self._request = request
        self._ray = ray
        self._view = view or RayView(ray)
        self._hold = hold
        self._wish = request.wish
        self._sending = threading.Lock()
        # The nodes of the run, by their ids.
        self.held: dict[str, HeldNode] = {}
        self._losses: dict[str, int] = {}
        # The reasons to leave nodes alone, by their ids.
        self._left_alone: dict[str, str] = {}
        self._has_begun = False
        self._takes_more = True
        # Nodes of earlier looks: one that joins the cluster is taken once in any case.
        self._known: set[str] = set()
        # The moment from which on nodes are taken again.
        self._not_before = 0.0
        self._serials = itertools.count()
        self._drained: set[str] = set()
        self._last_wait: str | None = None
        # The reservation that an autoscaler sees.
        self._demand: Any = None

    def send(self, message: Any, *fds: int) -> None:
        with self._sending:
            self._channel.send(message, *fds)

    def connect(self) -> None:
        """Connect to the cluster. Raises any exception of Ray."""
        address = self._wish.address
        options = {}
        host = address.removeprefix(_CLIENT).rpartition(":")[0]
        if host.startswith("127.") and not address.startswith(_CLIENT):
            # If not, Ray takes another address of this machine, and waits for minutes.
            options["_node_ip_address"] = host
        self._ray.init(address=address, log_to_driver=False, **options)
        for module in (ray_actor, private_folders):
            self._ray.cloudpickle.register_pickle_by_value(module)
        actor_class = self._ray.remote(ray_actor.AgentActor)
        project = ProjectStore(self._ray, self._request.archive)
        ground = Ground(self._ray, self._request, actor_class, project, self.send)
        self._hold = partial(HeldNode, ground)

    def serve(self) -> None:
        """Work until the runner closes the channel."""
        while True:
            self.look()
            until = time.monotonic() + LOOK_AT_RAY
            while wait_readable(self._channel, until):
                try:
                    messages = self._channel.receive()
                except EOFError:
                    return
                for message in messages:
                    self.on_message(message)

    def clean(self) -> None:
        """Remove what all nodes have kept for runs, busy or not."""
        task = self._ray.remote(ray_actor.clean)
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for node in self._view.look():
            try:
                asked = task.options(num_cpus=0, scheduling_strategy=affinity(node.id, soft=False)).remote()
                removed = self._ray.get(asked, timeout=CLEAN_TIMEOUT)
            except Exception as error:
                removed = [describe_error(error)]
            self.send(bridge_messages.NodeCleaned(node.name, tuple(removed)))

    def on_message(self, message: bridge_messages.ToBridge) -> None:
        match message:
            case bridge_messages.ReleaseNode(serial, refused):
                if refused:
                    for held in self._all_with(serial):
                        self._left_alone[held.seen.id] = refused
                self._release(serial)
            case bridge_messages.TakeMore(wanted):
                self._takes_more = wanted
            case bridge_messages.Connect():
                raise AssertionError("a second Connect")
            case _:
                unexpected(message)

    def _all_with(self, serial: int) -> list[HeldNode]:
        return [held for held in list(self.held.values()) if held.serial == serial]

    def _release(self, serial: int) -> None:
        for held in self._all_with(serial):
            threading.Thread(target=held.end, daemon=True).start()

    # -- nodes

    def look(self) -> None:
        """Start agents on nodes that have something free, and say what is missing."""
        seen = self._view.look()
        # Threads take nodes out at any time.
        held_nodes = dict(self.held)
        self._say_which_drain(seen, held_nodes)
        states = {node_id: held.state for node_id, held in held_nodes.items()}
        joined = list(states.values()).count(HeldState.JOINED)
        if joined >= (self._wish.nodes or 1):
            self._has_begun = True
        choice = choose_nodes(self._wish, seen, states, self._left_alone, self._has_begun)
        if choice.cannot:
            self.send(bridge_messages.CannotConnect(choice.cannot))
            return
        if choice.gives_back:
            for held in list(self.held.values()):
                self._release(held.serial)
        may_take = self._ask_for_more(choice.infeasible)
        if may_take and time.monotonic() >= self._not_before:
            self._take(choice.take)
        self._known.update(node.id for node in seen)
        if choice.waits_for != self._last_wait:
            self._last_wait = choice.waits_for
            self.send(bridge_messages.BridgeWaits(choice.waits_for))

    def _say_which_drain(self, seen: Sequence[SeenNode], held_nodes: Mapping[str, HeldNode]) -> None:
        """Say once of each node that has an agent that it is about to be taken away."""
        draining = {node.id for node in seen if node.drains}
        for node_id, held in held_nodes.items():
            if node_id in draining and node_id not in self._drained:
                self._drained.add(node_id)
                self.send(bridge_messages.NodeDrains(held.seen.name))

    def _ask_for_more(self, infeasible: bool) -> bool:
        """Show an autoscaler what the run wants, as a reservation that is pending. Returns whether none is."""
        if infeasible:
            if self._demand is None:
                bundle = {"CPU": 1.0}
                if self._wish.gpus:
                    bundle["GPU"] = float(self._wish.gpus)
                bundles = [bundle] * (self._wish.nodes or 1)
                self._demand = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
            return False
        if self._demand is not None:
            self._ray.util.remove_placement_group(self._demand)
            self._demand = None
            # What it has held is free at the next look.
            return False
        return True

    def _take(self, chosen: Sequence[SeenNode]) -> None:
        """Ask Ray for a part of some nodes: of all or none if the run wants an exact number of nodes."""
        assert self._hold is not None, "connect() comes first"
        taken = [node for node in chosen if self._takes_more or node.id not in self._known]
        all_at_once = self._wish.nodes is not None
        batches = [taken] if all_at_once else [[node] for node in taken]
        for batch in filter(None, batches):
            nodes = []
            for node in batch:
                part = self._wish.part_of(node.free)
                held = self._hold(node, part, next(self._serials))
                self.held[node.id] = held
                nodes.append(held)
            threading.Thread(target=self._serve_all, args=(nodes,), daemon=True).start()

    def _serve_all(self, nodes: Sequence[HeldNode]) -> None:
        until = time.monotonic() + RESERVE_TIMEOUT
        try:
            has_all = all(held.is_reserved(max(0.0, until - time.monotonic())) for held in nodes)
        except Exception:
            # The cluster is gone, which the next look shows.
            has_all = False
        if not has_all:
            self._not_before = time.monotonic() + random.uniform(*RETRY_AFTER)
            for held in nodes:
                self._forget(held)
            return
        for held in nodes:
            threading.Thread(target=self._serve_node, args=(held,), daemon=True).start()

    def _serve_node(self, held: HeldNode) -> None:
        try:
            held.serve()
        except Exception as error:
            self._lose(held, error)
        held.close_stream()
        self._forget(held)

    def _lose(self, held: HeldNode, error: Exception) -> None:
        """The agent, or what has to start it, has ended by itself."""
        node = held.seen
        losses = self._losses.get(node.id, 0) + 1
        self._losses[node.id] = losses
        is_lost = isinstance(error, EOFError) or type(error).__name__ in OF_NODES
        if not is_lost or losses >= MOST_LOSSES:
            self._left_alone[node.id] = f"node {node.name} cannot run tests: {describe_error(error)}"
        self.send(bridge_messages.NodeGone(node.name, describe_error(error)))

    def _forget(self, held: HeldNode) -> None:
        held.end()
        self.held.pop(held.seen.id, None)

    def close(self) -> None:
        """End all agents in order."""
        threads = [threading.Thread(target=held.end, daemon=True) for held in list(self.held.values())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HELD_NODE_END_TIMEOUT)

    def kill_all(self) -> None:
        for held in list(self.held.values()):
            held.kill()


def why_unreachable(address: str) -> str:
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
    channel: Channel[bridge_messages.ToBridge] = Channel.on(int(sys.argv[1]), bridge_messages.ToBridge)
    request = _first_request(channel)
    address = request.wish.address
    why = why_unreachable(address)
    if why:
        _refuse(channel, why)
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        _refuse(channel, f"ray cannot be imported: {error}")
    channel.send(bridge_messages.RayImported())
    bridge = Bridge(channel, request, ray)

    def on_sigterm(*_: object) -> None:
        """The runner was killed: the agents end with their actors, and those with this process or at once."""
        threading.Timer(1.5, os._exit, (0,)).start()
        shutil.rmtree(request.folder, ignore_errors=True)
        if address.startswith(_CLIENT):
            bridge.kill_all()
        os._exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        bridge.connect()
    except Exception as error:
        _refuse(channel, f"no connection to the Ray cluster at {address}: {describe_error(error)}")
    # Ray has put a handler of its own there.
    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        if request.cleans:
            bridge.clean()
        else:
            bridge.serve()
    except Exception as error:
        bridge.send(bridge_messages.CannotConnect(f"the Ray cluster at {address} is gone: {describe_error(error)}"))
    threading.Timer(2 * HELD_NODE_END_TIMEOUT, os._exit, (0,)).start()
    bridge.close()
    with suppress(Exception):
        ray.shutdown()
    os._exit(0)


def _first_request(channel: Channel[bridge_messages.ToBridge]) -> bridge_messages.Connect:
    received: list[bridge_messages.ToBridge] = []
    while not received:
        try:
            received += channel.receive()
        except EOFError:
            os._exit(0)
    (request,) = received
    assert isinstance(request, bridge_messages.Connect)
    return request


def _refuse(channel: Channel[bridge_messages.ToBridge], why: str) -> NoReturn:
    channel.send(bridge_messages.CannotConnect(why))
    os._exit(0)


class RayView:
    """Looks at the nodes of a cluster."""

    def __init__(self, ray: Any):
        self._ray = ray
        # The names of nodes, by their ids.
        self._names: dict[str, str] = {}

    def look(self) -> list[SeenNode]:
        """The nodes that are alive, as Ray describes them now."""
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        self.name(nodes.values())
        free = _known_to_ray(lambda state: state.available_resources_per_node())
        # If this is not known, a node that drains is lost without notice.
        draining = _known_to_ray(lambda state: state.state.get_draining_nodes())
        seen = []
        for node_id, node in nodes.items():
            resources = node["Resources"]
            seen.append(
                SeenNode(
                    node_id,
                    self._names[node_id],
                    Room.of(resources),
                    Room.of(free.get(node_id, resources)),
                    _aliases(node),
                    _pin(node),
                    node_id in draining,
                )
            )
        return seen

    def name(self, nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Name nodes by their host, or by address if hosts share names, as in a cluster pretended on one machine."""
        nodes = list(nodes)
        hosts = [node["NodeManagerHostname"] for node in nodes]
        addresses = [node["NodeManagerAddress"] for node in nodes]
        for node in nodes:
            node_id = node["NodeID"]
            if node_id in self._names:
                continue
            name = host = node["NodeManagerHostname"]
            is_unique = hosts.count(host) == 1
            if not is_unique:
                name = node["NodeManagerAddress"]
                is_unique = addresses.count(name) == 1
            if not is_unique or name in self._names.values():
                name = f"{name}-{node_id[:6]}"
            self._names[node_id] = name
        return self._names


def _aliases(node: Mapping[str, Any]) -> frozenset[str]:
    labels = (f"{name}={value}" for name, value in (node.get("Labels") or {}).items())
    return frozenset({node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"], *labels})


def _pin(node: Mapping[str, Any]) -> str:
    name = f"node:{node['NodeManagerAddress']}"
    return name if name in node["Resources"] else ""


def _known_to_ray(ask: Callable[[Any], Any]) -> Any:
    """The answer of Ray's own state, by node; nothing in a version of Ray that does not say."""
    try:
        from ray._private import state

        return ask(state)
    except Exception:
        # A private name, which another version may lack.
        return {}


if __name__ == "__main__":
    main()
