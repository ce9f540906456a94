"""The variables by which frameworks find their ranks, as a launcher such as torchrun sets them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._process import launcher_variables, system
from torch_testing_ext.launch.launchers import SET_BY_US
from torch_testing_ext.launch.ras import ADDRESS

# What this process was started with. A test that needs another port sets it before its ranks start.
_INHERITED_PORT = os.environ.get("MASTER_PORT")


@contextmanager
def leased(world_size: int, keep: bool = False) -> Iterator[dict[str, str]]:
    """Yield the variables common to all ranks of a test. Their ports belong to nobody else while the `with` lasts.

    `keep`: leave a MASTER_PORT that the test has set before its ranks start.
    """
    with leased_port() as port:
        environ = common(world_size, port)
        chosen = os.environ.get("MASTER_PORT")
        if keep and chosen is not None and chosen != _INHERITED_PORT:
            environ["MASTER_PORT"] = chosen
            environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if ADDRESS in os.environ:
            yield environ
            return
        with leased_port() as ras:
            yield {**environ, ADDRESS: f"localhost:{ras}"}


def common(world_size: int, port: int) -> dict[str, str]:
    """Return the variables common to all ranks. `port`: where rank 0 may listen."""
    size = str(world_size)
    own = {**dict.fromkeys(launcher_variables.OF_ALL_RANKS, size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Otherwise `env://` would look for the store of a launcher that has started this process.
    return {**system.for_gloo(), **own, **launcher_variables.own_store(os.environ)}


def become(rank: int) -> None:
    """Set the variables of this rank alone."""
    os.environ.update(dict.fromkeys(launcher_variables.OF_ONE_RANK, str(rank)))
    os.environ[SET_BY_US] = f"{rank}:{os.environ.get('MASTER_PORT', '')}"
