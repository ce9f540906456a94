"""The environment variables by which a launcher tells a process its place among the ranks. One table; the rest follows.

pytest's plugin imports this in every run, so it imports nothing that is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import NamedTuple


class LauncherVariables(NamedTuple):
    """The variables of one launcher; empty where it has none."""

    rank: str
    world_size: str
    local_world_size: str  # the number of ranks on this machine
    local_rank: str
    sign: str  # that only ranks of this launcher have
    nodes: str = ""  # the number of machines


TORCHRUN = LauncherVariables("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", sign="RANK")
OPEN_MPI = LauncherVariables(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    sign="OMPI_COMM_WORLD_RANK",
)
HYDRA = LauncherVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", sign="PMI_RANK")
# A batch script has SLURM_PROCID too, but is one process.
SRUN = LauncherVariables(
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "",
    "SLURM_LOCALID",
    sign="SLURM_STEP_NUM_TASKS",
    nodes="SLURM_STEP_NUM_NODES",
)
LAUNCHERS = (TORCHRUN, OPEN_MPI, HYDRA, SRUN)
# What starts the ranks of one machine for Slurm, Open MPI, MPICH and their kin; `native_threads` has torchrun. Linux
# cuts names after 15 letters.
PROGRAMS = {
    "slurmstepd",
    *("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"),
    *("mpiexec.hydra", "hydra_pmi_proxy"),
}
SIGNS = tuple(launcher.sign for launcher in LAUNCHERS)

PORT = "MASTER_PORT"
ADDRESS = "MASTER_ADDR"
# What torch's `env://` reads, and programs that do as it does.
OF_ONE_RANK = (TORCHRUN.rank, TORCHRUN.local_rank)
# Those that ranks of ours get.
of_each_rank = set(OF_ONE_RANK)
OF_ALL_RANKS = (TORCHRUN.world_size, TORCHRUN.local_world_size)
RENDEZVOUS = (*OF_ONE_RANK, *OF_ALL_RANKS, ADDRESS, PORT)
# The same in all ranks of a launch of torchrun, and in no others.
OF_ONE_LAUNCH = (ADDRESS, PORT, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_PREFIXES_OF_TORCHRUN = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
_STORE_PREFIX = "TORCHELASTIC_USE_"
# "True" if torchrun's agent has made the store at MASTER_ADDR and MASTER_PORT.
AGENT_STORE = f"{_STORE_PREFIX}AGENT_STORE"


def may_be_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has perhaps started a process with these variables."""
    return any(sign in environ for sign in SIGNS)


def has_program(environ: Mapping[str, str]) -> bool:
    """Whether one of PROGRAMS has set these variables of several ranks. torchrun is not alone with its own."""
    others = (environ.get(launcher.world_size, "") for launcher in LAUNCHERS if launcher != TORCHRUN)
    return any(size not in ("", "1") for size in others)


def is_one_machine(environ: Mapping[str, str], launcher: LauncherVariables) -> bool:
    """Whether all ranks of this launcher, which has set these variables, are on one machine.

    A script may set `RANK` and `WORLD_SIZE` to what another launcher says: then that one knows.
    """
    size = environ[launcher.world_size]
    for known in (launcher, *LAUNCHERS):
        if environ.get(known.world_size) == size:
            if environ.get(known.local_world_size, ""):
                return environ[known.local_world_size] == size
            if environ.get(known.nodes, ""):
                return environ[known.nodes] == "1"
    # Ranks on other machines would not find it.
    return is_loopback(environ.get(ADDRESS, ""))


def is_loopback(address: str) -> bool:
    """Whether an address, which may be empty, means this machine on every machine."""
    return address in ("", "localhost", "::1") or address.startswith("127.")


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of torchrun: another one may start from here."""
    return {
        name: value
        for name, value in environ.items()
        if name not in RENDEZVOUS and not name.startswith(_PREFIXES_OF_TORCHRUN)
    }


def drop_place(environ: MutableMapping[str, str]) -> None:
    """Remove what tells a process its place among ranks: what is started from here is no rank of that launch."""
    dropped: set[str] = set()
    for launcher in LAUNCHERS:
        if launcher.sign in environ:
            dropped.update(launcher)
    if TORCHRUN.sign in environ:
        dropped.update(environ.keys() - without_launch(environ).keys())
    for name in dropped & environ.keys():
        del environ[name]


def own_store(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that `env://` does not look for the store of the launcher that has set `environ`."""
    return dict.fromkeys((name for name in environ if name.startswith(_STORE_PREFIX)), "False")
