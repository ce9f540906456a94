import threading
import warnings

import pytest

from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase
from torch_testing_ext.ranks import spawn


class Finalized:
    def __del__(self):
        raise ValueError("finalized")


def in_a_thread(name):
    thread = threading.Thread(target=lambda: {}[name], name=name)
    thread.start()
    thread.join()


def in_a_finalizer(name):
    Finalized.__del__.__qualname__ = name
    Finalized()


def in_a_cycle(name):
    Finalized.__del__.__qualname__ = name
    finalized = Finalized()
    finalized.itself = finalized


def warned(name):
    warnings.warn(name)


def methods_of(kind, *sources):
    return {f"test_{source.__name__}": method(source, f"{kind}_{source.__name__}") for source in sources}


def method(source, name):
    return lambda self: source(name)


def spawning(source, name):
    return lambda self: spawn(lambda rank: source(name), 2)


def set_up(self):
    super(type(self), self).setUp()
    self._spawn_processes()


SOURCES = (in_a_thread, in_a_finalizer, warned)
TestMarked = pytest.mark.world_size(2)(type("TestMarked", (), methods_of("marked", *SOURCES, in_a_cycle)))
TestSpawn = type("TestSpawn", (), {f"test_{one.__name__}": spawning(one, f"spawn_{one.__name__}") for one in SOURCES})
OwnTest = type("OwnTest", (MultiProcessTestCase,), {"world_size": 2, "setUp": set_up, **methods_of("own", *SOURCES)})
KeptTest = type("KeptTest", (MultiProcContinuousTest,), {"world_size": 2, **methods_of("kept", *SOURCES)})
ERROR = pytest.mark.filterwarnings("error")
TestMarkedError = ERROR(type("TestMarkedError", (TestMarked,), {}))
TestSpawnError = ERROR(type("TestSpawnError", (TestSpawn,), {}))
OwnErrorTest = ERROR(type("OwnErrorTest", (MultiProcessTestCase,), vars(OwnTest) | methods_of("own", *SOURCES)))
