"""Starts agents on the nodes of a Ray cluster, by the bridge. Imports no ray."""

import enum
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from socket import socket

from torch_testing_ext._process import ends, user_commands
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext._process.event_loop import EventLoop, Timer, wait_readable
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.messages import unexpected

from . import bridge_messages
from .agent_messages import ClusterError, PrepareNode
from .cluster_nodes import ClusterNodes, NodeLauncher
from .remote_node import JoiningNode

BRIDGE = ("-m", "torch_testing_ext.runner.cluster.bridge")
RAY_IMPORT_TIMEOUT = 60.0
# The time to connect begins with the bridge; at least LEAST_CONNECT_TIMEOUT of it is left when ray is imported.
CONNECT_TIMEOUT = 9.0
LEAST_CONNECT_TIMEOUT = 7.0
BRIDGE_END_TIMEOUT = 10.0
# The time in which the bridge ends after a connection to it has ended.
EXIT_TIMEOUT = 2.0
# The bridge, which may be in a call of Ray, ends in 1.5 s.
SIGTERM_TIMEOUT = 2.0
# The last line of a traceback.
_ERROR = re.compile(r"\w+Error: ")
# The beginning of a line in a log of Ray: time, process and place in its source.
_ORIGIN = re.compile(r"^\[[^]]*\] (?:\S+:\d+: )?")


class BridgeState(enum.Enum):
    """The state of the bridge, as far as the runner knows."""

    IMPORTS = "imports ray"
    CONNECTS = "connects to the cluster"
    CONNECTED = "holds nodes, or waits for them"
    GONE = "has ended: nothing will come from it any more"


@dataclass
class RayLauncher(NodeLauncher):
    """The bridge, seen from the runner."""

    request: bridge_messages.Connect
    # Its root and its limits are completed for each node.
    prepare: PrepareNode
    log: Path
    # Take the accelerators that Ray names for fake ones.
    pretend: bool = False
    # The project, if the nodes have copies of it.
    copies_of: str = ""
    waits_for: str = "the Ray cluster"
    failure: str = ""
    _process: subprocess.Popen[bytes] | None = None
    cleaned: list[bridge_messages.NodeCleaned] = field(default_factory=list)
    _state: BridgeState = BridgeState.IMPORTS
    _takes_more: bool = True
    # The ends of agents, in words.
    _gone: dict[str, str] = field(default_factory=dict)
    # The serial numbers of the agents, by name of node.
    _serials: dict[str, int] = field(default_factory=dict)
    # Nodes that have joined once.
    _joined: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            missing = f"Ray, which is not installed: {user_commands.install('ray')}"
            raise ClusterError(f"--cluster {self.request.wish.address} needs {missing}")
        self.expected = self.request.wish.nodes or 0

    @property
    def is_connecting(self) -> bool:
        return self._state in (BridgeState.IMPORTS, BridgeState.CONNECTS)

    def open(self, loop: EventLoop, nodes: ClusterNodes) -> None:
        """Start the bridge, and ask it for nodes."""
        self._loop, self._nodes = loop, nodes
        self._started = time.monotonic()
        ours, theirs = socket_pair()
        self._channel: Channel[bridge_messages.FromBridge] = Channel(ours, bridge_messages.FromBridge)
        with theirs, self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *BRIDGE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=_environment(os.environ),
                start_new_session=True,
            )
        self._expect(BridgeState.IMPORTS, "importing ray", RAY_IMPORT_TIMEOUT)
        loop.listen(self._channel, self._receive)
        self._channel.send(self.request)

    def _give_up(self, what: str, timeout: float) -> None:
        self.failure = f"--cluster {self.request.wish.address}: {what} took more than {timeout:.0f} s"
        words = self._last_words()
        if words:
            self.failure += f"; Ray says: {words}"

    def _last_words(self) -> str:
        lines = tail(self.log, 2).splitlines()
        return _ORIGIN.sub("", lines[-1]) if lines else ""

    def _expect(self, state: BridgeState, what: str, timeout: float) -> None:
        self._state = state
        self._deadline: Timer = self._loop.after(timeout, partial(self._give_up, what, timeout))

    def _receive(self) -> None:
        try:
            for message in self._channel.receive():
                self._on_message(message)
        except EOFError:
            self._state = BridgeState.GONE
            self._loop.forget(self._channel)
            self._deadline.cancel()
            self.failure = self.failure or f"the process that speaks with Ray {self._exit()}"

    def _exit(self) -> str:
        """The end of the bridge, which has closed its channel, in words."""
        assert self._process is not None
        ended = ends.how_it_ended(self._process, EXIT_TIMEOUT)
        if ended is None:
            return "has closed its connection"
        words = self._last_words()
        return f"{ended}: {words}" if _ERROR.match(words) else ended

    def _on_message(self, message: bridge_messages.FromBridge) -> None:
        """Handle what the bridge says."""
        match message:
            case bridge_messages.RayImported():
                self._deadline.cancel()
                timeout = max(LEAST_CONNECT_TIMEOUT, CONNECT_TIMEOUT - (time.monotonic() - self._started))
                self._expect(BridgeState.CONNECTS, "connecting to Ray", timeout)
            case bridge_messages.CannotConnect(why):
                self._deadline.cancel()
                self.failure = why
            case bridge_messages.BridgeWaits(text):
                self._deadline.cancel()
                self._state = BridgeState.CONNECTED
                self.waits_for = text
            case bridge_messages.NodeJoined(name):
                self._gone.pop(name, None)
                how_it_ended = partial(self._how_it_ended, name)
                prepare = self._prepare_for(message)
                renamed = (message.root, self.copies_of) if self.copies_of else ("", "")
                stream = socket(fileno=message.fds[0])
                self._nodes.join(JoiningNode(name, stream, prepare, how_it_ended, message.warnings, renamed))
                # Not before: the agent that was there may be released now.
                self._serials[name] = message.serial
            case bridge_messages.NodeGone(name, why):
                self._gone[name] = why
                if name not in self._joined:
                    self._nodes.troubles.lose(f"node {name} cannot run tests: {why}")
            case bridge_messages.NodeCleaned():
                self.cleaned.append(message)
            case bridge_messages.NodeDrains(name):
                self._nodes.drain(name)
            case _:
                unexpected(message)

    def _prepare_for(self, node: bridge_messages.NodeJoined) -> PrepareNode:
        self._joined.add(node.name)
        jobs = node.cpus
        if self.prepare.jobs is not None:
            jobs = min(jobs, self.prepare.jobs)
        fake = node.gpus if self.pretend else ()
        return replace(self.prepare, root=node.root, jobs=jobs, fake_devices=fake, reserved=len(node.gpus))

    def _how_it_ended(self, name: str) -> str:
        """The bridge's words about an agent whose stream has ended: they come before that, unless the bridge ends."""
        until = time.monotonic() + EXIT_TIMEOUT
        while self._state is not BridgeState.GONE and name not in self._gone:
            if not wait_readable(self._channel, until):
                break
            self._receive()
        return self._gone.get(name) or self.failure or "the connection to its agent ended"

    def release(self, name: str, refused: str = "") -> None:
        if name in self._serials and self._state is not BridgeState.GONE:
            self._channel.send(bridge_messages.ReleaseNode(self._serials.pop(name), refused))

    def take_more(self, wanted: bool) -> bool:
        if wanted != self._takes_more and self._state is not BridgeState.GONE:
            self._takes_more = wanted
            self._channel.send(bridge_messages.TakeMore(wanted))
        return True

    def close(self, at_once: bool) -> None:
        """The bridge ends the agents in order; if it takes too long, Ray ends them when it is killed."""
        self._deadline.cancel()
        self._loop.forget(self._channel)
        self._channel.close()
        process, self._process = self._process, None
        if process is None:
            return
        # Until the bridge is connected it holds nothing.
        by_itself = BRIDGE_END_TIMEOUT if self._state is BridgeState.CONNECTED and not at_once else 0.1
        ends.end(process, by_itself=by_itself, after_sigterm=SIGTERM_TIMEOUT)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For the bridge: the modules that this process finds, and no noise of Ray."""
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str) and entry)
    return {**environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
