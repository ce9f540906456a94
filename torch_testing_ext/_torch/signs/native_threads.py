"""Threads of torch's C++ that serve others, as the kernel shows them."""

# Threads of gloo that serve connections and execute collectives, and those of a TCPStore's server: 2.11 to 2.15. They
# wake up all the time, or wait with a time-out of the group, or for other ranks: they matter only through the
# collectives that gloo's complete.
SERVING_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "pt_tcpstore")
# The loop of a connection has no name of its own in torch 2.11: it takes at most 64 events, and waits 10 ms for them.
_EPOLL_WAIT = {"x86_64": "232", "aarch64": "22"}
_OF_A_LOOP = (64, 10)


# torchrun, as a script and as its main thread is named: 2.11 to 2.15.
TORCHRUN = ("torchrun", "pt_elastic")


def serves(name: str, syscall: str, machine: str) -> bool:
    """Whether a thread with this name, in this system call, matters only through the collectives which it completes."""
    return name in SERVING_THREADS or is_loop_of_connections(syscall, machine)


def is_loop_of_connections(syscall: str, machine: str) -> bool:
    """Whether a thread waits as the loop does in which gloo serves its connections."""
    number, *arguments = syscall.split() or [""]
    if number != _EPOLL_WAIT.get(machine) or len(arguments) < 4:
        return False
    most_events, milliseconds = int(arguments[2], 16), int(arguments[3], 16)
    return (most_events, milliseconds) == _OF_A_LOOP
