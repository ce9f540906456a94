"""The variables by which frameworks find their ranks, as a launcher such as torchrun sets them."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._process import system
from torch_testing_ext._tests import launcher_variables, notes, system_refusals
from torch_testing_ext.launch import pretended_nodes
from torch_testing_ext.launch.launched_by import SET_BY_US
from torch_testing_ext.launch.rank_context import RankContext

# The address of NCCL's RAS, "host:port", one for each job that runs at the same time on a machine.
ADDRESS = "NCCL_RAS_ADDR"


# What this process was started with. A test that needs another port sets it before its ranks start.
_INHERITED_PORT = os.environ.get("MASTER_PORT")


@contextmanager
def leased_variables(world_size: int, keep: bool = False) -> Iterator[dict[str, str]]:
    """Yield the variables common to all ranks of a test. Their ports belong to nobody else while the `with` lasts.

    `keep`: leave a MASTER_PORT that the test has set before its ranks start.
    """
    with leased_port() as port:
        environ = common_variables(world_size, port)
        chosen = os.environ.get("MASTER_PORT")
        if keep and chosen is not None and chosen != _INHERITED_PORT:
            environ["MASTER_PORT"] = chosen
            environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if ADDRESS in os.environ:
            yield environ
            return
        with leased_port() as ras:
            yield {**environ, ADDRESS: f"localhost:{ras}"}


def common_variables(world_size: int, port: int) -> dict[str, str]:
    """Return the variables common to all ranks. `port`: where rank 0 may listen."""
    size = str(world_size)
    _check_network()
    own = {**dict.fromkeys(launcher_variables.OF_ALL_RANKS, size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Otherwise `env://` would look for the store of a launcher that has started this process.
    return {**for_gloo(), **own, **launcher_variables.own_store(os.environ)}


def for_gloo() -> dict[str, str]:
    """The environment variables to add so that gloo uses the loopback interface.

    All ranks are on this machine, so no host name has to be looked up.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    interfaces = [name for _, name in socket.if_nameindex()]
    return {"GLOO_SOCKET_IFNAME": system.LOOPBACK} if system.LOOPBACK in interfaces else {}


@functools.cache
def _check_network() -> None:
    """Warn, once, if ranks will not be able to connect: the errors that they will raise do not say why."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # It sends nothing.
            probe.connect(("127.0.0.1", 9))
        except OSError as error:
            notes.warn_user(
                f"ranks will not be able to connect, as nothing on this machine reaches 127.0.0.1 ({error.strerror}). "
                f"{system_refusals.NO_LOOPBACK}"
            )


def set_variables_of_rank(context: RankContext) -> None:
    """Set the variables of this rank alone, and give it what its node has."""
    rank, place = context.rank, context.place
    if context.can_restart:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(context.incarnation)
    os.environ.update(dict.fromkeys(launcher_variables.of_each_rank, str(rank)))
    if place.nodes > 1:
        os.environ.update(place.variables())
        pretended_nodes.enter(place, context.nodes.masks[place.node] if context.nodes.masks else {}, context.directory)
    os.environ[SET_BY_US] = f"{rank}:{os.environ.get('MASTER_PORT', '')}"
