"""The texts of errors by which torch says why a group has failed."""

import re

# of 2.11 to 2.15.

# The process at the other end of a collective or a store has gone.
LOST_PEER = re.compile(
    # gloo's pairs and TCPStore's sockets, with the system's words for the errno
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|connection lost"
    # NCCL, as ProcessGroupNCCL reports it
    r"|remote process exited|NCCL.*(remote error|communicator was aborted)"
    # TCPStore, and the exchange of NCCL's unique id over it
    r"|recvValue failed|sendBytes failed|socket (timeout|error)|failed to recv",
    re.IGNORECASE,
)
# A wait for other ranks was given up, by gloo, TCPStore or HashStore ("Wait timeout").
GAVE_UP = re.compile(r"timed out waiting|timed out after .* waiting|wait timeout", re.IGNORECASE)
# A store or a backend could not listen.
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
