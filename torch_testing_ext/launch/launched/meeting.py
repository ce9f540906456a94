"""The meeting of ranks that a launcher has started, at the coordinator in rank 0.

They meet by a Unix socket, or by TCP if they are on several machines. Then, rank 0 leaves the coordinator's address in
the launcher's store, with a token: the coordinator hears only connections that begin with it.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_testing_ext._process import messages
from torch_testing_ext.launch.accounts import now
from torch_testing_ext.launch.launched import peer_messages
from torch_testing_ext.launch.launched_by import Launched

# Rank 0 may import more than the others before its first test.
CONNECT_TIMEOUT = peer_messages.LONGEST_WAIT_FOR_IMPORTS
_IN_STORE = "coordinator"
_STEP = 0.05
# A rank that waits for rank 0 longer than that says so.
_LONGEST_SILENT_WAIT = 10.0


class WrongRound(RuntimeError):
    """The ranks cannot run this test together; the message says why."""


@dataclass(frozen=True)
class CoordinatorAddress:
    """The coordinator's address. `host`: by which ranks reach the machine of rank 0; `port`: 0 for a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""


def listen(launched: Launched) -> tuple[socket.socket, CoordinatorAddress, Any]:
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
        address = CoordinatorAddress()
    else:
        store = _connect_to_store(launched, now() + CONNECT_TIMEOUT)
        listener = socket.create_server(("", 0))
        address = CoordinatorAddress(_own_host(launched), listener.getsockname()[1], os.urandom(16).hex())
        store.set(_IN_STORE, messages.to_json(address))
    listener.listen(launched.world_size)
    return listener, address, store


def connect(launched: Launched) -> tuple[socket.socket, CoordinatorAddress]:
    """In any other rank: connect with the coordinator. Raises WrongRound."""
    until = now() + CONNECT_TIMEOUT
    if launched.is_one_machine:
        return _connect_until(launched, until, CoordinatorAddress)
    explaining = threading.Timer(_LONGEST_SILENT_WAIT, launched.say, [peer_messages.explain_wait(launched, "rank 0")])
    explaining.daemon = True
    explaining.start()
    try:
        store = _connect_to_store(launched, until)
        return _connect_until(launched, until, lambda: _published(store))
    finally:
        explaining.cancel()


def _connect_until(
    launched: Launched, until: float, address_of_coordinator: Callable[[], CoordinatorAddress]
) -> tuple[socket.socket, CoordinatorAddress]:
    while True:
        # Again each time: it may be that of an earlier program in the same ranks.
        address = address_of_coordinator()
        try:
            return _connect_once(launched, address), address
        except OSError as error:
            if now() > until:
                raise _not_found(str(error)) from None
        time.sleep(_STEP)


def _connect_once(launched: Launched, address: CoordinatorAddress) -> socket.socket:
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


def _published(store: Any) -> CoordinatorAddress:
    try:
        address: CoordinatorAddress = messages.from_json(store.get(_IN_STORE), messages.by_name(CoordinatorAddress))
        return address
    except RuntimeError as error:
        # For one, torch's DistStoreError.
        raise _not_found(str(error)) from None


def _not_found(why: str) -> WrongRound:
    return WrongRound(
        f"rank 0 of this launch was not found within {CONNECT_TIMEOUT:.0f} s ({why}). {peer_messages.how_to_unset()}"
    )


def _connect_to_store(launched: Launched, until: float) -> Any:
    """The store in which ranks on several machines find the coordinator. Raises WrongRound.

    In a thread, since torch's store waits without a limit for one who has accepted its connection and says nothing.
    """
    if not launched.store_host or not launched.store_port.isdecimal():
        raise WrongRound(
            "this launch has several machines, whose ranks meet at MASTER_ADDR and MASTER_PORT: torchrun sets "
            "these; with srun or mpirun, set them to the machine of rank 0 and a port that is free there"
        )
    makes_it = launched.rank == 0 and not launched.has_store
    address = f"{launched.store_host}:{launched.store_port}"
    if not makes_it:
        _wait_for_listener(launched, until)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        from torch_testing_ext._torch.groups import process_groups

        host, port = launched.store_host, int(launched.store_port)
        try:
            answers.put(process_groups.launcher_store(host, port, makes_it, max(1.0, until - now())))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=connect, name="torch_testing_ext store", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.0, until - now()))
    except queue.Empty:
        raise _not_found(f"what listens at {address} is no store of torch") from None
    if isinstance(answer, Exception):
        first = str(answer).partition("\n")[0] or type(answer).__name__
        raise _not_found(f"{address}: {first}") from None
    return answer


def _wait_for_listener(launched: Launched, until: float) -> None:
    """Wait until somebody listens at the address of the store: torch's own store prints long warnings until then."""
    address = launched.store_host, int(launched.store_port)
    while True:
        try:
            socket.create_connection(address, max(_STEP, until - now())).close()
            return
        except OSError as error:
            if now() > until:
                raise _not_found(f"{address[0]}:{address[1]}: {error.strerror or error}") from None
        time.sleep(_STEP)


def _own_host(launched: Launched) -> str:
    """The address of rank 0's machine, which need not be that of the store."""
    address = launched.store_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # It sends nothing.
        probe.connect((address, int(launched.store_port)))
        own = str(probe.getsockname()[0])
    if own.startswith("127."):
        # The address is a name of this machine, which others know by a real address.
        return address
    return own
