"""The meeting of a launcher's ranks and their hub: by a Unix socket, or by TCP if they are on several machines.

On several machines, rank 0 leaves the address of the hub in the launcher's store, with a token: the hub hears only
connections that begin with it.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from torch_testing_ext._process import messages

from .launchers import Launched
from .rank_report import now

CONNECT_TIMEOUT = 120.0  # rank 0 may import more than the others before its first test
_STEP = 0.05


class WrongRound(RuntimeError):
    """The ranks cannot run this test together; the message says why."""


@dataclass(frozen=True)
class HubAddress:
    """The hub's address. `host`: by which ranks reach the machine of rank 0; `port`: 0 for a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""


def listen(launched: Launched) -> tuple[socket.socket, HubAddress, Any]:
    """In rank 0: listen for the other ranks. Raises WrongRound.

    Keep the last thing that it returns: rank 0 may have made the store, which ends with this object.
    """
    store = None
    if launched.is_one_machine:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(launched.address)
        except OSError as error:
            raise WrongRound(f"another process is rank 0 of this launch: {error}") from None
        address = HubAddress()
    else:
        store = _store(launched)
        listener = socket.create_server(("", 0))
        address = HubAddress(_own_host(), listener.getsockname()[1], secrets.token_hex(16))
        store.set(launched.key, messages.to_json(address))
    listener.listen(launched.world_size)
    return listener, address, store


def connect(launched: Launched) -> tuple[socket.socket, HubAddress]:
    """In any other rank: connect with the hub. Raises WrongRound."""
    address = HubAddress() if launched.is_one_machine else _published(launched)
    until = now() + CONNECT_TIMEOUT
    while True:
        try:
            return _connect_once(launched, address), address
        except OSError as error:
            if now() > until:
                raise _not_found(error) from None
        time.sleep(_STEP)


def _connect_once(launched: Launched, address: HubAddress) -> socket.socket:
    if address.port:
        sock = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(launched.address)
    except OSError:
        sock.close()
        raise
    return sock


def _published(launched: Launched) -> HubAddress:
    store = _store(launched)
    try:
        found: HubAddress = messages.from_json(store.get(launched.key), messages.by_name(HubAddress))
        return found
    except RuntimeError as error:  # torch's DistStoreError is one
        raise _not_found(error) from None


def _not_found(error: Exception) -> WrongRound:
    return WrongRound(
        f"rank 0 of this launch was not found within {CONNECT_TIMEOUT:.0f} s ({error}). The variables "
        f"RANK and WORLD_SIZE say that a launcher has started this process; unset them if none has"
    )


def _store(launched: Launched) -> Any:
    from torch_testing_ext import _torch

    if not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise WrongRound(
            "this launch has several machines, whose ranks meet at MASTER_ADDR and MASTER_PORT: torchrun sets these; "
            "with srun or mpirun, set them to the machine of rank 0 and a port that is free there"
        )
    try:
        return _torch.launch.launcher_store(launched.rank, CONNECT_TIMEOUT)
    except RuntimeError as error:
        raise _not_found(error) from None


def _own_host() -> str:
    """The address of rank 0's machine, which need not be that of the store."""
    address = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, int(os.environ["MASTER_PORT"])))  # sends nothing
        own = str(probe.getsockname()[0])
    return address if own.startswith("127.") else own  # a name of this machine, which others know by a real address
