"""torch's records of collectives are read whole, and those of earlier tests do not count."""

import os
import pickle
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.groups import flight_recorder
from torch_testing_ext._torch.groups.flight_recorder import FlightRecorder


def counting(dumps):
    """The numbers of the entries that count."""
    found = []
    for first, data in dumps:
        entries = pickle.loads(data).get("entries", []) if data else []
        found += [entry["record_id"] for entry in entries if entry["record_id"] >= first]
    return found


@in_own_process
def test_collectives():
    world_of_one()
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0)
    assert counting(flight_recorder.recorded_collectives()) == [0, 1]
    assert counting(flight_recorder.take_collectives()) == [0, 1]
    assert counting(flight_recorder.take_collectives()) == []
    dist.all_reduce(torch.ones(1))
    assert counting(flight_recorder.recorded_collectives()) == [2]
    flight_recorder.forget_collectives()
    dist.all_reduce(torch.ones(1))
    assert counting(flight_recorder.recorded_collectives()) == [3]
    assert flight_recorder.sequence_numbers() == {"0": (4, 3, 0)}


def test_messages_that_no_longer_count():
    """They have used up numbers, which the collectives after them lack."""
    messages = flight_recorder.messages_of_process
    numbers = {"0": (9, 4, 0), "1": (3, 3, 0)}
    used_up = mock.patch.dict(flight_recorder.used_up, clear=True)
    with used_up, mock.patch.object(flight_recorder, "sequence_numbers", lambda: numbers):
        flight_recorder.forget_collectives()
        assert flight_recorder.used_up == {}
        messages._are_too_many = True
        flight_recorder.forget_collectives()
        assert flight_recorder.used_up == {"0": 5, "1": 0}
        assert messages.count() == 0


@in_own_process
def test_monitored_barriers_that_no_longer_count():
    """They have taken numbers of collectives, but used up none of the group in a world of one."""
    world_of_one()
    messages, begun = flight_recorder.messages_of_process, []
    messages.times_of_barriers = lambda: begun

    def barrier():
        begun[:] = [("0", time.time_ns())]
        messages._are_too_many = True
        dist.monitored_barrier()

    dist.all_reduce(torch.ones(1))
    barrier()
    flight_recorder.forget_collectives()
    assert flight_recorder.sequence_numbers() == {"0": (1, 3, -2)}
    barrier()
    dist.all_reduce(torch.ones(1))
    flight_recorder.forget_collectives()
    assert flight_recorder.sequence_numbers() == {"0": (2, 6, -4)}


@in_own_process
def test_stacks_do_not_import_the_compiler():
    # Other tests of this process may have imported it.
    for name in [name for name in sys.modules if name.startswith("torch._inductor")]:
        del sys.modules[name]
    world_of_one()
    dist.all_reduce(torch.ones(1))
    ((_, data),) = flight_recorder.recorded_collectives()
    (entry,) = pickle.loads(data)["entries"]
    assert any(frame["filename"] == __file__ for frame in entry["frames"])
    assert "torch._inductor" not in sys.modules


@in_own_process
def test_no_recorder():
    assert FlightRecorder("_dump_none_trace").dump(stacks=True) == b""
    assert flight_recorder.has_flight_recorder()
    for name, size, has in (
        ("TORCH_FR_BUFFER_SIZE", "0", False),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", " 0 ", False),
        ("TORCH_FR_BUFFER_SIZE", "20", True),
    ):
        with mock.patch.dict(os.environ, {name: size}):
            assert flight_recorder.has_flight_recorder() is has


def test_other_backends():
    """Each is read by a function of its own, or by its name where gloo's function takes one."""

    def gloo(*args):
        """_dump_fr_trace(includeCollectives, includeStackTraces, onlyActive, backend)"""

    module = SimpleNamespace(_dump_fr_trace=gloo, _dump_nccl_trace=None, _dump_fr_trace_json=None)
    with mock.patch.object(torch._C, "_distributed_c10d", module):
        recorders = []
        flight_recorder.use_recorders(set(), recorders)
        assert recorders == []
        for _ in range(2):
            flight_recorder.use_recorders({"nccl", "ucc"}, recorders)
        found = {(recorder.function, recorder.backend) for recorder in recorders}
        assert found == {("_dump_nccl_trace", None), ("_dump_fr_trace", "nccl"), ("_dump_fr_trace", "ucc")}
        assert len(recorders) == 3
        gloo.__doc__ = None
        flight_recorder.use_recorders({"nccl"}, others := [])
        assert [(recorder.function, recorder.backend) for recorder in others] == [("_dump_nccl_trace", None)]


def test_names_of_sources():
    """A file whose name is not UTF-8 costs the stacks, not the record."""
    asked = []

    def dump(collectives, stacks, active, **which):
        asked.append((collectives, stacks, active, which))
        if stacks:
            raise RuntimeError("not UTF-8")
        return b"record"

    with mock.patch.object(torch._C, "_distributed_c10d", SimpleNamespace(dump=dump)):
        assert FlightRecorder("dump", "nccl").dump(stacks=True) == b"record"
    which = {"backend": "nccl"}
    assert asked == [(True, True, False, which), (True, False, False, which)]


def test_backends_of_groups():
    group = SimpleNamespace(
        _device_types=["cpu", "cuda"],
        _get_backend=lambda device: SimpleNamespace(name=lambda: {"cuda": "NCCL2"}.get(device, "gloo")),
    )
    assert flight_recorder.backends_of(group, "cpu:gloo,cuda:nccl") == {"nccl", "nccl2"}
    assert flight_recorder.backends_of(object(), "gloo") == set()


class Counter:
    """A group, or a backend, with a sequence number or none."""

    def __init__(self, number, **parts):
        self._number = number
        vars(self).update(parts)

    def _get_sequence_number_for_group(self):
        if self._number is None:
            raise RuntimeError("none")
        return self._number


@pytest.mark.parametrize(("own", "of_backend"), [(4, None), (None, 4)])
def test_sequence_numbers(own, of_backend):
    """That of the group, or that of its only backend."""
    one = Counter(of_backend)
    group = Counter(own, _device_types=["cpu", "cuda"], _get_backend=lambda device: one)
    assert flight_recorder._sequence_number(group) == 4


def test_no_sequence_number():
    group = Counter(None, _device_types=["cpu", "cuda"], _get_backend={"cpu": 1, "cuda": 2}.get)
    with pytest.raises(RuntimeError, match="several backends"):
        flight_recorder._sequence_number(group)
