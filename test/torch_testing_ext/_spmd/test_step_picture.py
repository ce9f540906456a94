"""Pictures of calls: one file with the computation and the communication of all ranks."""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from loops import update
from torch import nn

from torch_testing_ext._spmd.gradient_buckets import events_of
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

BACKWARD = "autograd::engine::evaluate_function"


def span(name, cat, tid, ts, dur=1.0, **args):
    return {"ph": "X", "pid": 7, "name": name, "cat": cat, "tid": tid, "ts": ts, "dur": dur, "args": args}


def drawn(trace):
    """(row, name, time, arguments) of each event that `events_of` draws."""
    events = events_of(3, trace)
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return sorted((rows[e["tid"]], e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "X")


class TestEventsOfARank(TestCase):
    """Traces that torch's profiler might have written."""

    def test_gloo(self):
        trace = {
            "baseTimeNanoseconds": 5000,
            "traceEvents": [
                {"ph": "i", "name": "Iteration Start", "ts": 0, "pid": "Traces", "tid": "Trace"},
                span("spmd|48|start bucket 0", "user_annotation", 1, 10.0, 5.0),
                span("c10d::allreduce_", "cpu_op", 1, 12.0),
                span("c10d::_allgather_base_", "cpu_op", 1, 20.0),
                span("gloo:all_gather", "user_annotation", 2, 21.0),
                span("aten::copy_", "cpu_op", 2, 21.5),
                span("gloo:all_reduce", "user_annotation", 3, 22.0),
            ],
        }
        self.assertEqual(
            drawn(trace),
            [
                ("communication", "bucket 0", 27.0, {"bytes": 48}),
                ("communication", "gloo:all_gather", 26.0, {}),
                ("computation", "c10d::_allgather_base_", 25.0, {}),
                ("computation", "c10d::allreduce_", 17.0, {}),
                ("computation", "start bucket 0", 15.0, {"bytes": 48}),
            ],
        )

    def test_nccl(self):
        """On an accelerator its own rows count, not what the host does."""
        trace = {
            "traceEvents": [
                span("spmd|48|start bucket 1", "user_annotation", 1, 10.0, 5.0),
                span("c10d::allreduce_", "cpu_op", 1, 12.0),
                span("sgemm", "kernel", 7, 13.0),
                span("spmd|48|start bucket 1", "gpu_user_annotation", 7, 12.5),
                span("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "kernel", 20, 14.0),
                span("nccl:all_reduce", "gpu_user_annotation", 20, 14.0),
            ],
        }
        self.assertEqual(
            drawn(trace),
            [
                ("communication", "bucket 1", 14.0, {"bytes": 48}),
                ("computation", "sgemm", 13.0, {}),
                ("computation", "start bucket 1", 12.5, {"bytes": 48}),
            ],
        )


class TestPicture(DTensorContinuousTestBase):
    """Two ranks train a model of several buckets."""

    world_size = 2

    def _draw(self, style):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        step = compile(parallel_mode=DataParallel(style))(update)
        batch = torch.randn(16, 512), torch.randn(16, 512)
        for _ in range(2):
            step(model, optimizer, batch)
        with tempfile.TemporaryDirectory() as folder:
            file = [folder]
            dist.broadcast_object_list(file, 0)
            path = Path(file[0], "step.json")
            with step.picture(path):
                step(model, optimizer, batch)
            dist.barrier()
            events = json.loads(path.read_text())["traceEvents"]
            dist.barrier()
        return events

    @parametrize("style", ["replicate", "fully_shard"])
    def test_communication_beside_the_backward(self, style):
        events = self._draw(style)
        names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        self.assertEqual(names, ["rank 0", "rank 1"])
        for rank in range(2):
            mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
            buckets = {e["name"]: e for e in mine if e["cat"] == "communication" and e["name"].startswith("bucket")}
            self.assertEqual(sorted(buckets), [f"bucket {number}" for number in range(len(buckets))])
            self.assertGreater(len(buckets), 2)
            self.assertEqual(sum(event["args"]["bytes"] for event in buckets.values()), 8 * (512 * 512 + 512) * 4)
            end = buckets["bucket 0"]["ts"] + buckets["bucket 0"]["dur"]
            begin = next(event["ts"] for event in mine if event["name"] == "start bucket 0")
            backward = [e for e in mine if e["cat"] == "computation" and e["name"].startswith(BACKWARD)]
            self.assertGreater(len([event for event in backward if event["ts"] > begin]), 8)
            self.assertTrue([e for e in backward if e["ts"] < end and begin < e["ts"] + e["dur"]])
            gathers = [event for event in mine if event["name"] == "gather of parameters"]
            self.assertEqual(bool(gathers), style == "fully_shard")
            self.assertTrue([event for event in mine if event["name"].startswith("Optimizer.step")])


instantiate_parametrized_tests(TestPicture)

if __name__ == "__main__":
    run_tests()
