"""Ranks inherit what they would find out before they compile by inductor, and see the same as without it."""

import os
import shutil
import subprocess
import sys
import unittest
from unittest import mock

import torch
import torch._inductor.config
from multi_process_support import Ranks, ranks_told

from torch_testing_ext import launch
from torch_testing_ext._cases.multi_process import _run_rank
from torch_testing_ext._machine import accelerators
from torch_testing_ext._torch import DYNAMO, INDUCTOR
from torch_testing_ext.common_utils import TestCase, run_tests

STATE = "torch_testing_ext._cases.compiler_state"
needs_cpp_compiler = unittest.skipUnless(shutil.which(os.environ.get("CXX", "g++")), "inductor needs a C++ compiler")
not_beside_accelerators = unittest.skipIf(
    accelerators.device_may_exist(), "beside accelerators, ranks find everything out by themselves"
)


def wave(x):
    return (x.sin() * 2 + x.cos()).relu()


def chosen():
    """The vector instructions that inductor chooses from, and how many processes it has started to find them."""
    from torch._inductor import cpu_vec_isa

    # `subprocess.run` itself is one of the circumstances of a check: what it starts is counted one level below.
    with mock.patch.object(subprocess.Popen, "__init__", autospec=True, side_effect=subprocess.Popen.__init__) as made:
        found = [(str(isa), isa.build_arch_flags(), isa.bit_width()) for isa in cpu_vec_isa.valid_vec_isa_list()]
    return [found, made.call_count]


class Compiles(Ranks):
    world_size = 1

    def compiles(self):
        """Tell all that a test can see of a compilation: results, code, counters and what was asked of caches."""
        from torch._dynamo.utils import counters
        from torch._inductor import metrics
        from torch._inductor.utils import run_and_get_code
        from torch._subclasses.fake_tensor import FakeTensorMode

        torch._inductor.config.fx_graph_cache = False
        before = {name: dict(values) for name, values in counters.items() if values}
        cached = FakeTensorMode.cache_info()
        step = torch.compile(wave, backend="inductor", fullgraph=True)
        result, code = run_and_get_code(step, torch.arange(100.0))
        after = {name: dict(values) for name, values in counters.items() if values}
        self.tell(
            [
                result.tolist(),
                code,
                before,
                after,
                [cached.hits, cached.misses, cached.size],
                metrics.generated_kernel_count,
                torch.rand(3).tolist(),
            ]
        )

    def chooses(self):
        self.tell(chosen())

    def chooses_as_settings_say(self):
        torch._inductor.config.cpp.vec_isa_ok = False
        self.tell(chosen())

    def chooses_under_other_circumstances(self):
        os.environ["LD_LIBRARY_PATH"] = "/no/such/folder"
        self.tell(chosen())

    def chooses_where_nothing_can_be_loaded(self):
        error = subprocess.CalledProcessError(1, "python")
        with (
            mock.patch.object(subprocess, "run", side_effect=error),
            mock.patch.object(subprocess, "check_call", side_effect=error),
        ):
            self.tell(chosen()[0])


class CompileAlike(Ranks):
    """Two ranks that compile the same graph."""

    def one_is_changed(self):
        """Rank 1 compiles by an inductor that a test has changed there alone."""
        from torch._inductor import compile_fx
        from torch._inductor.utils import run_and_get_code

        torch._inductor.config.fx_graph_cache = False
        compile_graph, calls = compile_fx.fx_codegen_and_compile, []

        def changed(graph, *args, **kwargs):
            calls.append(graph)
            if self.rank == 1:
                for node in graph.graph.nodes:
                    if node.target is torch.ops.aten.sin.default:
                        node.target = torch.ops.aten.cos.default
            return compile_graph(graph, *args, **kwargs)

        with mock.patch.object(compile_fx, "fx_codegen_and_compile", changed):
            result, code = run_and_get_code(torch.compile(wave, backend="inductor"), torch.zeros(8))
        self.tell([result[0].item(), len(calls), len(code)])


def ranks_of(test, *imports):
    """What the rank of a test tells, forked from a process that has imported these modules."""
    launch.close()
    launch.prepare(launch.Named.of(_run_rank), launch.Named.of(type(test)), imports)
    return ranks_told(test)[0]


@needs_cpp_compiler
class TestCompilerState(TestCase):
    def tearDown(self):
        launch.close()
        super().tearDown()

    def test_a_compilation_looks_the_same(self):
        with_state = ranks_of(Compiles("compiles"), DYNAMO, INDUCTOR, STATE)
        without = ranks_of(Compiles("compiles"), DYNAMO, INDUCTOR)
        names = ("result", "code", "counters before", "counters after", "fake tensors", "kernels", "random numbers")
        for name, ours, theirs in zip(names, with_state, without, strict=True):
            self.assertEqual(ours, theirs, name)
        self.assertIn("cpp_fused", with_state[1][0])

    @not_beside_accelerators
    def test_instructions_are_tried_once(self):
        found, started = ranks_of(Compiles("chooses"), DYNAMO, INDUCTOR, STATE)
        expected, _ = ranks_of(Compiles("chooses"), DYNAMO, INDUCTOR)
        self.assertEqual(found, expected)
        self.assertEqual(started, 0)

    def test_settings_decide(self):
        found, _ = ranks_of(Compiles("chooses_as_settings_say"), DYNAMO, INDUCTOR, STATE)
        expected, _ = ranks_of(Compiles("chooses_as_settings_say"), DYNAMO, INDUCTOR)
        self.assertEqual(found, expected)

    @unittest.skipUnless(sys.platform == "linux", "other loaders read other variables")
    def test_other_circumstances(self):
        _, started = ranks_of(Compiles("chooses_under_other_circumstances"), DYNAMO, INDUCTOR, STATE)
        self.assertGreater(started, 0)

    def test_a_check_that_fails_here(self):
        found = ranks_of(Compiles("chooses_where_nothing_can_be_loaded"), DYNAMO, INDUCTOR, STATE)
        self.assertEqual(found, [])

    def test_each_rank_compiles_by_itself(self):
        launch.close()
        told = ranks_told(CompileAlike("one_is_changed"))
        self.assertEqual(told, [[1.0, 1, 1], [3.0, 1, 1]])

    def test_what_is_imported_for_ranks_is_a_hint(self):
        launch.close()
        launch.prepare(launch.Named.of(_run_rank), launch.Named.of(Compiles), ("tabnanny",))
        self.addCleanup(launch.client.launcher().preload_hints.pop, "tabnanny", None)
        self.assertIn("tabnanny", launch.preload_hints())


if __name__ == "__main__":
    run_tests()
