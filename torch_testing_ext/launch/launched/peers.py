"""The look for other ranks of a launch on this machine: somebody else may have left its variables.

The shell of a launcher has such variables, and so have processes that a test of a rank starts. So a process is taken
for a rank only if another rank shows itself by a socket with a name. It waits longer for that if there is a process
that may become one. Ranks on several machines look for each other when their first test begins, at the coordinator.
"""

from __future__ import annotations

import enum
import functools
import os
import socket
import time

from torch_testing_ext._process import system, terminal
from torch_testing_ext._tests import launcher_variables as variables
from torch_testing_ext.launch import launched_by
from torch_testing_ext.launch.launched_by import Launched, this_launch

from .peer_messages import LONGEST_WAIT_FOR_IMPORTS, explain_left_variables, explain_wait

# A launcher starts the processes of all ranks within moments.
LONGEST_WAIT_FOR_PEER = 2.0
# The answer of `why_no_rank`, for processes that this one starts in its own place: the workers of pytest-xdist.
NO_RANK = "_TORCH_TESTING_EXT_NO_RANK"
_STEP = 0.05


class PeerEvidence(enum.Enum):
    """The result of a look for other ranks."""

    NONE = "nothing shows that there is another rank"
    PROMISE = "another rank may yet answer"
    PEER = "another rank has answered"


@functools.cache
def why_no_rank() -> str:
    """Say why this process is no rank although it has the variables of one; "" if it is one, or has none."""
    launched = this_launch()
    if launched is None:
        return ""
    # Programs that a test starts look for themselves.
    known = os.environ.pop(NO_RANK, None)
    why_not = terminal.from_variable(known) if known else _wait_for_peer(launched)
    if why_not:
        launched_by.withdraw()
    return why_not


def _wait_for_peer(launched: Launched) -> str:
    """Return why this process is no rank; "" as soon as another rank has answered, or if ranks are elsewhere, too."""
    if not launched.is_one_machine:
        return ""
    began = time.monotonic()
    is_said = False
    while (evidence := look(launched)) is not PeerEvidence.PEER:
        waited = time.monotonic() - began
        if waited > (LONGEST_WAIT_FOR_PEER if evidence is PeerEvidence.NONE else LONGEST_WAIT_FOR_IMPORTS):
            return explain_left_variables(launched)
        if waited > LONGEST_WAIT_FOR_PEER and not is_said:
            is_said = True
            launched.say(explain_wait(launched))
        time.sleep(_STEP)
    return ""


def look(launched: Launched) -> PeerEvidence:
    """Look for another rank of this launch on this machine, once."""
    if not system.LINUX:
        # Other systems show neither such sockets nor the variables of processes.
        return PeerEvidence.PEER
    if _shows_itself(launched):
        return PeerEvidence.PEER
    may_come = not os.path.exists("/proc/self/environ") or _may_come(launched)
    return PeerEvidence.PROMISE if may_come else PeerEvidence.NONE


def _shows_itself(launched: Launched) -> bool:
    """Whether another rank has announced itself on this machine, or rank 0 listens there."""
    others = (rank for rank in range(launched.world_size) if rank != launched.rank)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        if any(probe.connect_ex(launched.sign_of(rank)) == 0 for rank in others):
            return True
    if launched.rank == 0:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(launched.address) == 0


def _may_come(launched: Launched) -> bool:
    """Whether a process of this machine has the variables of another rank."""
    others = system.environments(variables.SIGNS)
    return any(NO_RANK not in environ and launched.is_with(environ, parent) for environ, parent in others)
