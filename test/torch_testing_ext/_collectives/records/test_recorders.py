"""Every backend's flight recorder is read, and the entries of all are understood.

The entries are as torch's FlightRecorder.hpp and ProcessGroupNCCL.cpp write them. The check `hang-explained` of
benchmarks/gpu/run covers those that NCCL really leaves.
"""

import pickle
import subprocess
import sys
import types
import unittest
import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from kit.files import subject

from torch_testing_ext._collectives.findings.deadlocks import waiting_calls
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.records.raw_records import pack_record, read_raw
from torch_testing_ext._machine.fake_accelerator import registering
from torch_testing_ext._torch.groups import flight_recorder, made_groups
from torch_testing_ext._torch.signs import recorded_entries


def entry(number, name, at, state="completed", retired=True, **more):
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": at,
        "timeout_ms": 600000,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": retired,
        "is_p2p": False,
        "frames": [],
        "duration_ms": 0.1,
        "time_discovered_started_ns": at,
        "time_discovered_completed_ns": at if state == "completed" else None,
        **more,
    }


def record(rank, *recorders):
    groups = [("0", "default_pg", (0, 1), rank, "store", 50)]
    return read_raw(
        rank, pack_record(groups, [(0, pickle.dumps({"entries": list(each)})) for each in recorders], [], "/t/", 1)
    )


def waiting(*records):
    return {rank: [str(wait.call) for wait in found] for rank, found in waiting_calls(records).items()}


class TestEntries(unittest.TestCase):
    """Covered on a GPU by the check `hang-explained`."""

    def test_a_mismatch_under_each_name_of_nccl(self):
        """Covered on a GPU by the check `hang-explained`."""
        for backend in ("nccl", "nccl2", "nccl-lazy", "mine"):
            here = record(0, (), [entry(0, f"{backend}:all_reduce", 100), entry(1, f"{backend}:broadcast", 101)])
            there = record(1, (), [entry(0, f"{backend}:all_reduce", 100), entry(1, f"{backend}:all_gather", 101)])
            found = first_mismatch([here, there])
            self.assertIn("call #2 of the default group", found.sentence, backend)

    def test_point_to_point_of_nccl_does_not_count_as_a_collective(self):
        """Covered on a GPU by the check `hang-explained`."""
        send = entry(0, "nccl:send 0->1", 100, is_p2p=True, p2p_seq_id=1)
        both = entry(1, "nccl:coalesced", 101, is_p2p=True, p2p_seq_id=2)
        receive = entry(0, "nccl:recv 1<-0", 100, is_p2p=True, p2p_seq_id=1)
        here, there = (
            record(0, [send, both, entry(2, "nccl:all_reduce", 102)]),
            record(1, [receive, entry(1, "nccl:all_reduce", 102)]),
        )
        self.assertIsNone(first_mismatch([here, there]))
        self.assertEqual({"coalesced"}, set(here.p2p.values()))
        self.assertEqual({"recv 1<-0"}, set(there.p2p.values()))

    def test_who_waits_under_nccl(self):
        """Covered on a GPU by the check `hang-explained`."""
        done = entry(0, "nccl2:all_reduce", 100)
        for state in ("scheduled", "started"):
            here = record(0, (), [done, entry(1, "nccl2:all_gather", 101, state, retired=False)])
            self.assertEqual({0: ["all_gather #2 [4]"]}, waiting(here, record(1, (), [done])))

    def test_a_backend_that_does_not_tell_the_end_of_a_call(self):
        """Its calls are retired when they are issued: one that waits for a member must not look as if it were over.

        `test_a_real_recorder_of_another_backend` has such a one; no check of benchmarks/gpu/run has.
        """
        issued = entry(0, "mine:all_reduce", 100, "scheduled")
        self.assertEqual({0: ["all_reduce #1 [4]"]}, waiting(record(0, [issued]), record(1, ())))
        self.assertEqual({}, waiting(record(0, [issued]), record(1, [issued])))

    def test_gloo_retires_a_call_at_its_end(self):
        """No GPU is involved."""
        done = entry(0, "gloo:all_reduce", 100, "scheduled")
        self.assertEqual({}, waiting(record(0, [done]), record(1, ())))

    def test_the_calls_of_several_recorders_are_in_the_order_of_their_time(self):
        """Each counts from 0. Covered on a GPU by the check `hang-explained`, with "cpu:gloo,cuda:nccl"."""
        gloo = [entry(0, "gloo:barrier", 100, "scheduled"), entry(1, "gloo:all_reduce", 103, "scheduled")]
        nccl = [entry(7, "nccl:all_reduce", 101), entry(8, "nccl:broadcast", 102)]
        found = record(0, gloo, nccl)
        orders = sorted((call.order, call.kind) for calls in found.calls.values() for call in calls)
        self.assertEqual([(0, "barrier"), (1, "all_reduce"), (2, "broadcast"), (3, "all_reduce")], orders)

    def test_a_recorder_whose_clock_was_set_back_keeps_its_own_order(self):
        """No GPU is involved."""
        found = record(0, [entry(0, "gloo:a", 100), entry(1, "gloo:b", 90)], [entry(0, "nccl:c", 95)])
        of_gloo = next(calls for key, calls in found.calls.items() if key.backend == "gloo" and calls)
        self.assertEqual(["a", "b"], [call.kind for call in sorted(of_gloo, key=lambda call: call.order)])


class TestAsked(unittest.TestCase):
    """Which recorders are read. Covered on a GPU by the check `hang-explained`."""

    def asked_for(self, *backends, by_name):
        asked = []

        def dump_fr(*arguments, **backend):
            asked.append(("fr", backend.get("backend")))
            return b""

        dump_fr.__doc__ = "(..., backend: str = 'gloo')" if by_name else "()"
        module = types.SimpleNamespace(
            _dump_fr_trace=dump_fr,
            _dump_fr_trace_json=None,
            _dump_fr_trace_file=None,
            _dump_nccl_trace=lambda *arguments: asked.append(("nccl",)) or b"",
            _dump_nccl_trace_json=None,
        )
        recorders = [flight_recorder.FlightRecorder("_dump_fr_trace")]
        with mock.patch.object(torch._C, "_distributed_c10d", module):
            for names in backends:
                flight_recorder.use_recorders(names, recorders)
            flight_recorder.recorded_collectives(recorders)
        return asked

    def test_a_source_whose_name_is_not_utf8(self):
        def dump(collectives, stacks, active):
            if stacks:
                raise RuntimeError("Unable to cast Python instance of type <class 'str'>")
            return b"calls"

        with mock.patch.object(torch._C._distributed_c10d, "_dump_test", dump, create=True):
            self.assertEqual(flight_recorder.FlightRecorder("_dump_test").dump(stacks=True), b"calls")

    def test_gloo_alone(self):
        """No GPU is involved."""
        self.assertEqual([("fr", None)], self.asked_for(set(), by_name=True))

    def test_each_backend_by_its_name(self):
        """Covered on a GPU by the check `hang-explained`, with torch 2.15."""
        found = self.asked_for({"nccl", "nccl2"}, {"nccl2"}, {"mine"}, by_name=True)
        self.assertEqual([("fr", None), ("nccl",), ("fr", "nccl"), ("fr", "nccl2"), ("fr", "mine")], found)

    def test_older_torch_has_one_function_for_each(self):
        """Covered on a GPU by the check `hang-explained`, before torch 2.15."""
        self.assertEqual([("fr", None), ("nccl",)], self.asked_for({"nccl"}, by_name=False))

    def test_the_timeout_of_a_store(self):
        """Also where another owner is a deprecated name of torch, which would warn."""
        store, default = dist.HashStore(), dist.HashStore()
        for each, seconds in (store, 3), (default, 5):
            each.set_timeout(timedelta(seconds=seconds))
        c10d = dist.distributed_c10d
        with (
            mock.patch.object(dist, "is_initialized", lambda: True),
            mock.patch.object(c10d, "_get_default_store", lambda: default),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            self.assertEqual(made_groups.timeout_of_store([dist.reduce_op, store]), 3.0)
            self.assertEqual(made_groups.timeout_of_store([dist.reduce_op]), 5.0)
        self.assertIsNone(made_groups.timeout_of_store(None))

    def test_names_of_a_group(self):
        """Covered on a GPU by the check `hang-explained`."""

        class Group:
            _device_types = (torch.device("cpu"), torch.device("cuda"))

            def _get_backend(self, device):
                return types.SimpleNamespace(name=lambda: "gloo" if device.type == "cpu" else "nccl2")

        self.assertEqual({"nccl", "nccl2"}, flight_recorder.backends_of(Group(), "cpu:gloo,cuda:nccl"))
        self.assertEqual({"mine"}, flight_recorder.backends_of(object(), "Mine"))
        self.assertEqual(set(), flight_recorder.backends_of(object(), "gloo"))

    def test_gloo_records_for_fake_accelerators(self):
        """torch 2.15 records their calls by itself, too: each would count twice."""
        self.assertEqual(set(), flight_recorder.backends_of(object(), f"cpu:gloo,fakeacc:{registering.BACKEND}"))
        self.assertEqual(recorded_entries.THROUGH_GLOO, registering.BACKEND)

    def test_a_real_recorder_of_another_backend(self):
        """torch 2.15 records those by a hook. Covered on a GPU by the check `hang-explained`."""
        if "backend" not in (torch._C._distributed_c10d._dump_fr_trace.__doc__ or ""):
            self.skipTest("this torch records gloo only")
        code = subject(__file__, "backend_of_the_user.py")
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual("[('mine:all_reduce', 'scheduled', True)]", run.stdout.strip(), run.stderr)


if __name__ == "__main__":
    unittest.main()
