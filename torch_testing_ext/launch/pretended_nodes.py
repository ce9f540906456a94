"""Nodes that one machine pretends to be: where each rank is, and what its process has of its node."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The addresses 127.0.0.2 to 127.0.0.254 are left for them: the first one is that of every node itself.
MOST_NODES = 200
# What a process keeps on the disk of its node, by variable: the name of the folder there.
_FOLDERS = {
    "TMPDIR": "tmp",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
}


@dataclass(frozen=True)
class Nodes:
    """The nodes of a test. Each has as many ranks, one after the other."""

    count: int = 1
    # Of each node, the variables that show its accelerators; () if there are too few to share out.
    masks: tuple[Mapping[str, str], ...] = ()

    def place(self, rank: int, world_size: int) -> Place:
        """The place of a rank."""
        size = world_size // self.count
        return Place(rank // size, rank % size, size, self.count)


@dataclass(frozen=True)
class Place:
    """The place of a rank: its node, and its number among the ranks there."""

    node: int
    local_rank: int
    local_world_size: int
    nodes: int = 1

    @property
    def host_name(self) -> str:
        return name_of(self.node)

    @property
    def address(self) -> str:
        return address_of(self.node)

    def variables(self) -> dict[str, str]:
        """The variables by which torchrun, and programs that are made for it, tell the place."""
        return {
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "NODE_RANK": str(self.node),
            "NNODES": str(self.nodes),
        }


def why_not(nodes: int, world_size: int) -> str:
    """Why so many ranks cannot be on so many nodes; "" if they can."""
    if nodes > MOST_NODES:
        return f"a machine can pretend to be {MOST_NODES} nodes at most"
    if world_size % nodes:
        return f"{world_size} ranks cannot be shared out evenly among {nodes} nodes"
    return ""


def name_of(node: int) -> str:
    """The host name of a node."""
    return f"node{node}"


def address_of(node: int) -> str:
    """The address of a node. Only Linux has all of 127.0.0.0/8 on the loopback interface."""
    return f"127.0.0.{node + 2}" if sys.platform == "linux" else "127.0.0.1"


def enter(place: Place, masks: Mapping[str, str], directory: Path) -> None:
    """Be a process on a node, until it ends. In `directory`, with the files of the test, each node has a folder."""
    folder = directory / place.host_name
    for variable, name in _FOLDERS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(folder / name)
    # It remembers the folder of the process before.
    tempfile.tempdir = None
    os.environ.update(masks)
    os.environ["HOSTNAME"] = place.host_name
    _have_host_name(place)
    _keep_memory_apart(place)


def is_this_node(host: str) -> bool:
    """Whether a host name or address means the very node on which it is used, whichever that is."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback and str(address) in ("127.0.0.1", "::1")
    return False


def _have_host_name(place: Place) -> None:
    """Let Python answer with the names and addresses of nodes."""
    addresses = {name_of(node): address_of(node) for node in range(place.nodes)}
    system: Any = os.uname
    names = system()
    own = os.uname_result((names.sysname, place.host_name, names.release, names.version, names.machine))
    os.uname = lambda: own
    # It remembers the answer.
    vars(platform)["_uname_cache"] = None
    resolver: Any = socket
    resolver.gethostname = lambda: place.host_name
    resolver.getfqdn = lambda name="", fqdn=socket.getfqdn: fqdn(name) if name else place.host_name
    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        setattr(resolver, name, _resolving(getattr(resolver, name), addresses))


def _resolving(resolve: Callable[..., Any], addresses: Mapping[str, str]) -> Callable[..., Any]:
    """A function that looks up a host, which knows the nodes, too."""

    def call(host: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve(addresses.get(host, host) if isinstance(host, str) else host, *args, **kwargs)

    return call


def _keep_memory_apart(place: Place) -> None:
    """Let shared memory have another name on each node, so that a process finds only that of its own."""
    import secrets
    from multiprocessing.shared_memory import SharedMemory

    suffix = f".{place.host_name}"
    begin: Any = SharedMemory.__init__

    def make(memory: Any, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        own = f"psm_{secrets.token_hex(4)}" if name is None and args + tuple(kwargs.values()) else name
        begin(memory, own if own is None or own.endswith(suffix) else own + suffix, *args, **kwargs)

    vars_of_class: Any = SharedMemory
    vars_of_class.__init__ = make
