"""The kinds of ranks that a test can have."""

import enum


class HostKind(enum.Enum):
    """The kinds of ranks that a test can have. The values are for documents and messages."""

    FRESH = "fresh ranks of a test class"
    KEPT = "ranks that tests share"
    OWN = "ranks that a class starts itself"
    THREADS = "threads"
    INHERITING = "ranks of a marked function, or of `spawn`"
    SCRIPT = "ranks of `run_script`"
    TORCHRUN = "ranks of `run_script(launcher='torchrun')`"
    LAUNCHED = "ranks of a launcher"
    WORLD = "ranks of a whole world"
