"""Steps that ask the world outside of their program: refused, or guarded; against DDP on two ranks."""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import ctypes
import datetime
import decimal
import functools
import gc
import io
import logging
import math
import multiprocessing
import os
import queue
import random
import re
import secrets
import string
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref

import numpy
import torch
from guarded import Scenario, play
from torch import nn

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
TABLE = {"scale": 1.0}
FILES = []


class Structure(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_double),)


class Referent:
    value = 1.0


def read_file(own):
    with open(own.path) as file:
        return float(file.read())


def read_globals(own):
    return globals()["TABLE"]["scale"]


def run_in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def in_a_with_block(own):
    with threading.Lock():
        return time.monotonic() % 3


REFUSED = {
    "time": lambda own: time.time() % 3,
    "perf_counter_ns": lambda own: time.perf_counter_ns() % 3,
    "datetime": lambda own: datetime.datetime.now().second,
    "date": lambda own: datetime.date.today().day,
    "clock_in_with": in_a_with_block,
    "uuid": lambda own: uuid.uuid4().int % 3,
    "secrets": lambda own: secrets.randbelow(3),
    "urandom": lambda own: os.urandom(1)[0],
    "new_random": lambda own: random.Random().random(),
    "new_generator": lambda own: numpy.random.default_rng().random(),
    "initial_seed": lambda own: torch.initial_seed() % 3,
    "rng_state": lambda own: torch.random.get_rng_state().numel(),
    "autocast_cache": lambda own: 2 if torch.is_autocast_cache_enabled() else 1,
    "open": read_file,
    "exists": lambda own: 2 if os.path.exists(own.path) else 1,
    "size": lambda own: os.path.getsize(own.path),
    "listdir": lambda own: len(os.listdir(os.path.dirname(own.path))),
    "cwd": lambda own: len(os.getcwd()),
    "file_opened_before": lambda own: float(FILES[0].readline()),
    "file_as_iterator": lambda own: float(next(FILES[0])),
    "subprocess": lambda own: len(subprocess.run(["true"]).args),
    "simple_queue": lambda own: own.queue.get(),
    "text_in_memory": lambda own: len(own.text.getvalue()),
    "thread": lambda own: run_in_thread(lambda: TABLE["scale"]),
}

WRITTEN = {
    "bytearray": lambda own: own.bytes.__setitem__(0, own.bytes[0] + 1),
    "memoryview": lambda own: own.view.__setitem__(0, 5),
    "array": lambda own: own.array.append(2.0),
    "ndarray": lambda own: own.ndarray.fill(2.0),
    "ndarray_in_list": lambda own: own.ndarrays[0].__setitem__((0, 1), 2.0),
    "queue": lambda own: own.fifo.put(1),
}

# What the step reads, and what changes it before the third call.
GUARDED = {
    "environ": (lambda own: float(os.environ["SPMD_SCALE"]), lambda own: os.environ.update(SPMD_SCALE="3.0")),
    "getenv": (lambda own: float(os.getenv("SPMD_SCALE")), lambda own: os.environ.update(SPMD_SCALE="3.0")),
    "in_environ": (lambda own: 2 if "SPMD_NEW" in os.environ else 1, lambda own: os.environ.update(SPMD_NEW="1")),
    "argv": (lambda own: len(sys.argv), lambda own: sys.argv.append("more")),
    "thread_local": (lambda own: own.local.scale, lambda own: setattr(own.local, "scale", 3.0)),
    "context_variable": (lambda own: CONTEXT.get(), lambda own: CONTEXT.set(3.0)),
    "weak_reference": (lambda own: own.reference().value, lambda own: setattr(own.referent, "value", 3.0)),
    "bytearray": (lambda own: own.bytes[0], lambda own: own.bytes.__setitem__(0, 3)),
    "memoryview": (lambda own: own.view[0], lambda own: own.bytes.__setitem__(0, 3)),
    "array": (lambda own: own.array[0], lambda own: own.array.__setitem__(0, 3.0)),
    "ctypes": (lambda own: own.number.value, lambda own: setattr(own.number, "value", 3.0)),
    "structure": (lambda own: own.structure.scale, lambda own: setattr(own.structure, "scale", 3.0)),
    "shared_value": (lambda own: own.shared.value, lambda own: setattr(own.shared, "value", 3.0)),
    "shared_array": (lambda own: own.shared_array[0], lambda own: own.shared_array.__setitem__(0, 3.0)),
    "event": (lambda own: 2 if own.event.is_set() else 1, lambda own: own.event.set()),
    "chain_map": (lambda own: own.chain["scale"], lambda own: own.chain.maps[1].update(scale=3.0)),
    "function_attribute": (
        lambda own: getattr(own.helper, "scale", 1.0),
        lambda own: setattr(own.helper, "scale", 3.0),
    ),
    "ndarray": (lambda own: own.ndarray[0], lambda own: own.ndarray.fill(3.0)),
    "queue": (lambda own: own.fifo.qsize(), lambda own: own.fifo.put(1)),
    "semaphore": (lambda own: own.semaphore._value, lambda own: own.semaphore.release()),
    "config": (lambda own: own.config.getfloat("a", "scale"), lambda own: own.config.set("a", "scale", "3.0")),
    "template": (lambda own: float(own.template.substitute()), lambda own: setattr(own.template, "template", "3.0")),
    "level_of_logger": (lambda own: own.logger.level, lambda own: own.logger.setLevel(30)),
    "enabled_logger": (
        lambda own: 2.0 if own.logger.isEnabledFor(logging.INFO) else 1.0,
        lambda own: own.logger.setLevel(30),
    ),
    "weak_set": (lambda own: len(own.weak_set), lambda own: own.weak_set.add(own.second)),
    "weak_keys": (lambda own: own.weak_keys[own.referent], lambda own: own.weak_keys.update({own.referent: 3.0})),
    "weak_values": (lambda own: len(own.weak_values), lambda own: own.weak_values.update(more=own.second)),
    "dispatched": (lambda own: own.dispatched(1), lambda own: own.dispatched.register(int, lambda x: 3.0)),
    "metaclass": (lambda own: own.of_meta.scale, lambda own: setattr(type(own.of_meta), "scale", 3.0)),
    "globals": (read_globals, lambda own: TABLE.update(scale=3.0)),
    "cache": (lambda own: own.cached(2.0), lambda own: (TABLE.update(scale=3.0), own.cached.cache_clear())),
    "threads": (lambda own: torch.get_num_threads(), lambda own: torch.set_num_threads(3)),
    "deterministic": (
        lambda own: 2 if torch.are_deterministic_algorithms_enabled() else 1,
        lambda own: torch.use_deterministic_algorithms(True),
    ),
    # A layer of torch has asked for it before the step does.
    "asked_by_torch_first": (
        lambda own: (nn.functional.layer_norm(torch.ones(2), (2,)), 2 if torch.backends.cudnn.enabled else 1)[1],
        lambda own: torch.backends.cudnn.set_flags(_enabled=False),
    ),
    "decimal_places": (
        lambda own: float(decimal.Decimal(1) / decimal.Decimal(3)),
        lambda own: setattr(decimal.getcontext(), "prec", 2),
    ),
    "places_of_an_attribute": (lambda own: float(own.third / 3), lambda own: setattr(decimal.getcontext(), "prec", 2)),
    "errors_of_numpy": (
        lambda own: 2 if numpy.geterr()["divide"] == "ignore" else 1,
        lambda own: numpy.seterr(divide="ignore"),
    ),
    "base_class": (lambda own: own.derived.scale, lambda own: setattr(own.derived, "__bases__", (own.other,))),
    "defaults": (lambda own: own.optimizer.defaults["lr"], lambda own: own.optimizer.defaults.update(lr=3.0)),
}

ALLOWED = {
    "logging": lambda own: len(repr(logging.getLogger("spmd").debug("a message"))),
    "pattern": lambda own: len(re.match("a+", "aa").group()),
    "text_of_its_own": lambda own: len(io.StringIO("ab").getvalue()),
    "seeded_random": lambda own: random.Random(3).random(),
    "date_from_numbers": lambda own: datetime.date(2020, 1, 2).day,
    "math": lambda own: math.sqrt(2),
    "import": lambda own: len(__import__("fractions").__name__),
}


def prepare(own, side):
    """Everything that the tables read; the same for both sides."""
    own.optimizer = side.optimizer
    own.removed_at_the_end = tempfile.NamedTemporaryFile("w")  # noqa: SIM115 (open as long as the test runs)
    own.removed_at_the_end.write("1.0\n")
    own.removed_at_the_end.flush()
    own.path = own.removed_at_the_end.name
    FILES[:] = [open(own.path)]  # noqa: SIM115
    own.queue, own.text, own.local = queue.SimpleQueue(), io.StringIO("x"), threading.local()
    own.queue.put(1.0)
    own.local.scale = 1.0
    own.referent = Referent()
    own.reference = weakref.ref(own.referent)
    own.bytes = bytearray(b"\1\2")
    own.view, own.array = memoryview(own.bytes), array.array("d", [1.0])
    own.number, own.structure = ctypes.c_double(1.0), Structure(1.0)
    own.shared, own.shared_array = multiprocessing.Value("d", 1.0), multiprocessing.Array("d", [1.0])
    own.event, own.chain = threading.Event(), collections.ChainMap({}, {"scale": 1.0})
    own.ndarray, own.ndarrays = numpy.ones(2), [numpy.ones((3, 2)).T]
    own.fifo, own.semaphore, own.config = queue.Queue(), threading.Semaphore(1), configparser.ConfigParser()
    own.fifo.put(1)
    own.config["a"] = {"scale": "1.0"}
    own.template, own.logger = string.Template("1.0"), logging.getLogger(f"spmd.{id(own)}")
    own.logger.setLevel(10)
    own.second = Referent()
    own.weak_set, own.weak_keys = weakref.WeakSet([own.referent]), weakref.WeakKeyDictionary({own.referent: 1.0})
    own.weak_values = weakref.WeakValueDictionary({"first": own.referent})
    own.dispatched = functools.singledispatch(lambda x: 1.0)
    own.of_meta = type("Meta", (type,), {"scale": 1.0})("OfMeta", (), {})
    decimal.getcontext().prec, own.third = 28, decimal.Decimal(1)
    numpy.seterr(divide="warn")
    own.base, own.other = type("Base", (Referent,), {"scale": 1.0}), type("Other", (Referent,), {"scale": 3.0})
    own.derived = type("Derived", (own.base,), {})
    own.helper = lambda x: x
    own.cached = functools.lru_cache(lambda factor: TABLE["scale"] * factor)


def asking(ask):
    def make(side):
        prepare(side.own, side)
        own = side.own

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).pow(2).mean() * ask(own)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return make


@instantiate_parametrized_tests
class TestWorld(DTensorContinuousTestBase):
    world_size = 2

    def play(self, ask, **others):
        os.environ["SPMD_SCALE"] = "1.0"  # a rank's own, as everything that a test changes
        play(self, Scenario(asking(ask), **others), "replicate")

    @parametrize("name", REFUSED)
    def test_refused(self, name):
        self.play(REFUSED[name], refused="The step (reads|draws)", tolerance=0)

    @parametrize("name", WRITTEN)
    def test_refused_write(self, name):
        self.play(lambda own: (WRITTEN[name](own), 1.0)[1], refused="The step sets own")

    @parametrize("name", GUARDED)
    def test_guarded(self, name):
        ask, change = GUARDED[name]
        self.play(ask, change=lambda i, side: change(side.own) if i == 2 else None)

    @parametrize("read", ["value", "setting"])
    def test_guarded_beside_an_object_that_is_replaced_by_an_equal_one(self, read):
        value = torch.tensor(1.0)

        def ask(own):
            return own.scales[0] * (value.item() if read == "value" else torch.get_num_threads())

        def change(i, side):
            side.own.scales = [1.0]
            if i == 2:
                value.fill_(3.0)
                torch.set_num_threads(3)

        self.play(ask, change=change)

    def test_garbage_collection_is_no_part_of_the_step(self):
        def clock(phase, info):
            time.perf_counter()

        gc.callbacks.append(clock)
        gc.set_threshold(1)
        self.play(lambda own: len([[] for _ in range(1000)]) / 1000)

    @parametrize("name", ALLOWED)
    def test_allowed(self, name):
        self.play(ALLOWED[name])


if __name__ == "__main__":
    run_tests()
