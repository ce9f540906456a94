"""Starts agents on the nodes of a Ray cluster, by the bridge. Imports no ray."""

from __future__ import annotations

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

from torch_testing_ext._process import reaping
from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.logs import tail
from torch_testing_ext._process.loop import EventLoop, Timer, wait_readable
from torch_testing_ext._process.messages import unexpected

from .agent_messages import PrepareNode
from .bridge_protocol import (
    BridgeWaits,
    CannotConnect,
    Connect,
    FromBridge,
    NodeDrains,
    NodeGone,
    NodeJoined,
    RayImported,
    ReleaseNode,
)
from .cluster_nodes import ClusterError, JoiningNode, LauncherListener

IMPORT_TIMEOUT = 60.0
# From the start of the bridge, but at least so much of it after it has imported ray.
CONNECT_TIMEOUT = 9.0
LEAST_CONNECT_TIMEOUT = 7.0
END_TIMEOUT = 10.0
SIGTERM_TIMEOUT = 2.0  # the bridge, which may be in a call of Ray, ends in 1.5 s
_ORIGIN = re.compile(r"^\[[^]]*\] (?:\S+:\d+: )?")  # of a line in a log of Ray: time, process and place in its source
INSTALL = "pip install 'torch-testing-ext[ray]'"


@dataclass
class RayLauncher:
    """The bridge, seen from run_test.py."""

    request: Connect
    prepare: PrepareNode  # its root and its limits are completed for each node
    log: Path
    pretend: bool = False  # take the accelerators that Ray names for fake ones
    waits_for: str = "the Ray cluster"
    failure: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _is_connected: bool = False
    _gone: dict[str, str] = field(default_factory=dict)  # how agents ended
    _serials: dict[str, int] = field(default_factory=dict)  # of the agents, by name of node
    _joined: set[str] = field(default_factory=set)  # nodes that have joined once

    def __post_init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ClusterError(f"--cluster {self.request.address} needs Ray, which is not installed: {INSTALL}")

    @property
    def expected(self) -> int:
        return self.request.nodes or 0

    def open(self, loop: EventLoop, listener: LauncherListener) -> None:
        self._loop, self._listener = loop, listener
        self._started = time.monotonic()
        ours, theirs = socket_pair()
        self._channel: Channel[FromBridge] = Channel(ours, FromBridge)
        command = [sys.executable, "-m", "torch_testing_ext.runner.cluster.bridge", str(theirs.fileno())]
        with theirs, self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=_environment(os.environ),
                start_new_session=True,
            )
        self._deadline: Timer = loop.after(IMPORT_TIMEOUT, partial(self._give_up, "importing ray", IMPORT_TIMEOUT))
        loop.listen(self._channel, self._receive)
        self._channel.send(self.request)

    def _give_up(self, what: str, timeout: float) -> None:
        lines = tail(self.log, 2).splitlines()
        said = f"; Ray says: {_ORIGIN.sub('', lines[-1])}" if lines else ""
        self.failure = f"--cluster {self.request.address}: {what} took more than {timeout:.0f} s{said}"

    def _receive(self) -> None:
        try:
            received = self._channel.receive()
        except EOFError:
            self._loop.forget(self._channel)
            self._deadline.cancel()
            how = reaping.describe_exit(self._process.wait() if self._process is not None else None)
            self.failure = self.failure or f"the process that speaks with Ray {how}: {tail(self.log, 5)}"
            return
        for message in received:
            self._on_message(message)

    def _on_message(self, message: FromBridge) -> None:
        match message:
            case RayImported():
                self._deadline.cancel()
                timeout = max(LEAST_CONNECT_TIMEOUT, CONNECT_TIMEOUT - (time.monotonic() - self._started))
                self._deadline = self._loop.after(timeout, partial(self._give_up, "connecting to Ray", timeout))
            case CannotConnect(why):
                self._deadline.cancel()
                self.failure = why
            case BridgeWaits(text):
                self._deadline.cancel()
                self._is_connected = True
                self.waits_for = text
            case NodeJoined(name, fds=(fd,)):
                self._gone.pop(name, None)
                how_it_ended = partial(self._how_it_ended, name)
                self._listener.join(JoiningNode(name, socket(fileno=fd), self._prepare_for(message), how_it_ended))
                self._serials[name] = message.serial  # not before: the agent that was there may be released now
            case NodeJoined():
                raise AssertionError(f"{message} has no descriptor for its stream")
            case NodeGone(name, why, is_node):
                self._gone[name] = why
                if name not in self._joined:
                    self._listener.refuse(f"node {name} cannot run tests: {why}", is_node)
            case NodeDrains(name):
                self._listener.drain(name)
            case _:
                unexpected(message)

    def _prepare_for(self, node: NodeJoined) -> PrepareNode:
        self._joined.add(node.name)
        jobs = node.cpus if self.prepare.jobs is None else min(node.cpus, self.prepare.jobs)
        fake = node.gpus if self.pretend else ()
        return replace(
            self.prepare,
            root=node.root,
            jobs=jobs,
            fake_devices=fake,
            reserved=len(node.gpus),
        )

    def _how_it_ended(self, name: str) -> str:
        """The bridge's words about an agent whose stream has ended; they come before it closes the stream."""
        while name not in self._gone and wait_readable(self._channel, 0.0):
            before = self.failure
            self._receive()
            if self.failure != before:
                return self.failure
        return self._gone.get(name, "the connection to its agent ended")

    def release(self, name: str) -> None:
        if name in self._serials:
            self._channel.send(ReleaseNode(self._serials.pop(name)))

    def close(self) -> None:
        """The bridge ends the agents in order; if it takes too long, Ray ends them when it is killed."""
        self._deadline.cancel()
        self._loop.forget(self._channel)
        self._channel.close()
        process, self._process = self._process, None
        if process is None:
            return
        by_itself = END_TIMEOUT if self._is_connected else 0.1  # until then it holds nothing
        reaping.end(process, by_itself=by_itself, after_sigterm=SIGTERM_TIMEOUT)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For the bridge: the modules that this process finds, and no noise of Ray."""
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str) and entry)
    return {**environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
