# Owner(s): ["oncall: distributed"]
"""Compiled `replicate` and DDP: torch.compile for forward, compiled autograd for backward.

The compiled models train next to an eager `replicate` with the C++ reducer, and must
match its numbers. Tests named `..._gpu`, `_bf16`, ... run on two accelerators; their
names end in `_on_cpu` if they run on the CPU.

Graphs never come from a cache: each test traces, buckets and generates code itself.
Compiled C++ kernels do come from inductor's cache: the first run on a machine builds
them, and a precompiled header that alone takes 10 seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import unittest
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_triton_code
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as ddp_default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

from torch_testing_ext.common_distributed import (
    MultiProcessTestCase,
    at_least_x_gpu,
    requires_gloo,
    skip_if_lt_x_gpu,
    skip_if_rocm_multiprocess,
    sm_is_or_higher_than,
)
from torch_testing_ext.common_fsdp import has_triton
from torch_testing_ext.common_utils import lazy_skip_if, run_tests

BACKEND = "inductor"
# A pool of compile workers would import torch once more for each rank. Without one, inductor starts no thread when it
# is imported, so that ranks inherit it from this process instead of importing it in each test.
torch._inductor.config.compile_threads = 1

# A layer's weight is 1 MB, so that four layers make three buckets: the first is full with
# 1 MB, the others with 2. PyTorch's tests have the same plan with layers of 16 MB and
# buckets of 25, which takes three times as long.
DIM = 512
BUCKET_MB = 2
BUCKETS = 3

COALESCED = ["fuse_ddp_with_coalesced_op", "schedule_comm_wait"]
CONCATENATED = ["fuse_ddp_with_concat_op", "schedule_comm_wait"]
WAIT = "torch.ops._c10d_functional.wait_tensor.default"

CXX = os.environ.get("CXX", "g++")


def needs_cpp_compiler(test: Callable) -> Callable:
    """A test whose ranks compile for the CPU, as `compiles` tells `setUp`."""
    test.compiles = True
    return unittest.skipUnless(shutil.which(CXX), f"inductor needs a C++ compiler, and there is no {CXX}")(test)


def on_cpu(test: Callable) -> Callable:
    """A test on the CPU, for which nobody has to lease an accelerator."""
    return requires_gloo()(needs_cpp_compiler(test))


# Last of the decorators: without accelerators, the reason to skip is that there are none.
needs_triton = lazy_skip_if(lambda: not has_triton(), "inductor needs Triton, and support for it here")


def accelerator() -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device.type


class Net(nn.Module):
    """Four square linear layers, the first one optionally checkpointed."""

    def __init__(self, checkpoint: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(DIM, DIM)
        self.fc2 = nn.Linear(DIM, DIM)
        self.fc3 = nn.Linear(DIM, DIM)
        self.fc4 = nn.Linear(DIM, DIM)
        self.use_checkpoint = checkpoint

    def forward(self, x):
        x = checkpoint(self.fc1, x, use_reentrant=False) if self.use_checkpoint else self.fc1(x)
        return self.fc4(self.fc3(self.fc2(x)))


def compiler_fn(dynamic: bool | None = None) -> Callable:
    """What compiles the graph of a backward pass. It fails instead of falling back to eager."""
    return functools.partial(torch.compile, backend=BACKEND, fullgraph=True, dynamic=dynamic)


@functools.cache
def _compile_once() -> None:
    """Do here, for all ranks, what the first training step of a process does.

    It tries the vector instructions and builds the patterns, which takes a rank as long as
    a third of a test. With an accelerator, this only imports: fake tensors ask CUDA's
    driver for its devices in C++ (`_ensureCUDADeviceGuardSet`), which does not survive a fork.
    """
    importlib.import_module("torch._inductor.compile_fx")
    if shutil.which(CXX) is not None and not at_least_x_gpu(1):
        # Autograd starts its threads now: none. Once fake tensors have been used, a build with CUDA seems to have eight
        # devices, each of which would get a thread with the first backward pass.
        torch.ones(1, requires_grad=True).backward()
        with compiled_autograd._enable(compiler_fn()):
            torch.compile(nn.Linear(2, 2), backend=BACKEND)(torch.ones(1, 2)).sum().backward()
        torch._dynamo.reset()
        # Ranks are forks: tests count what they compile themselves.
        counters.clear()


# A worker of pytest-xdist also imports the file if other workers run its tests: there, the first
# test that compiles does it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compile_once()


class MultiProcessInductorTestCase(MultiProcessTestCase):
    """A test case whose ranks compile without graph caches."""

    def setUp(self) -> None:
        super().setUp()
        # Not for a test that skips.
        if at_least_x_gpu(2) or hasattr(getattr(self, self._testMethodName), "compiles"):
            _compile_once()

    def _init_process_group(self, device_type: str) -> None:
        """Set up a rank. As each test has its own processes, nothing needs to be restored."""
        torch._inductor.config.fx_graph_cache = False
        torch._functorch.config.enable_autograd_cache = False
        torch._dynamo.config.optimize_ddp = "python_reducer"
        if device_type != "cpu":
            torch.accelerator.set_device_index(self.rank % torch.accelerator.device_count())
        dist.init_process_group(
            backend=dist.get_default_backend_for_device(device_type),
            rank=self.rank,
            world_size=self.world_size,
            store=dist.FileStore(self.file_name, self.world_size),
        )


class ReplicateTest(MultiProcessInductorTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _test_compile(
        self,
        *,
        use_gpu: bool,
        no_sync: bool,
        setup_func: Callable | None = None,
        no_compile_forward: bool = False,
        checkpoint: bool = False,
    ) -> None:
        device = accelerator() if use_gpu else "cpu"
        self._init_process_group(device)
        torch.manual_seed(123)
        net = Net(checkpoint=checkpoint).to(device)
        nets = {"eager replicate": net, "compiled replicate": deepcopy(net), "compiled DDP": deepcopy(net)}
        model, compiled_replicate_model, compiled_ddp_model = (
            wrap(each, bucket_cap_mb=BUCKET_MB)
            for wrap, each in zip((replicate, replicate, DDP), nets.values(), strict=True)
        )
        if setup_func:
            setup_func(model, compiled_replicate_model, compiled_ddp_model)
        if not no_compile_forward:
            compiled_replicate_model = torch.compile(compiled_replicate_model, backend=BACKEND, fullgraph=False)
            compiled_ddp_model = torch.compile(compiled_ddp_model, backend=BACKEND, fullgraph=True)
        models = [model, compiled_replicate_model, compiled_ddp_model]
        optims = [torch.optim.Adam(each.parameters()) for each in models]

        # Without sync, each rank keeps its own gradients in the first iteration, and the
        # second adds to them.
        for i in range(2):
            torch.manual_seed(123 + self.rank + self.world_size * i)  # no batch occurs twice
            input = torch.randn([1, DIM]).to(device)
            sync = not no_sync or i == 1
            for model_idx in range(3):
                bwd_context = cpp_reducer() if model_idx == 0 else compiled_autograd._enable(compiler_fn())
                with self._gradient_sync(models[model_idx], sync), bwd_context:
                    loss = models[model_idx](input).sum()
                    loss.backward()
            self._check_grads(nets, i, same_on_all_ranks=sync)
            if sync:
                for optim in optims:
                    optim.step()
                    optim.zero_grad()

        for name, other in nets.items():
            for key, param in net.named_parameters():
                self.assertEqual(param, other.get_parameter(key), msg=f"{key} of {name} at the end")
        self.assertGreater(counters["compiled_autograd"]["captures"], 0, "no backward was compiled")

    @on_cpu
    @torch._inductor.config.patch(_fuse_ddp_communication_passes=COALESCED)
    def test_compile_cpu(self):
        self._test_compile(use_gpu=False, no_sync=False)

    @on_cpu
    @torch._inductor.config.patch(_fuse_ddp_communication_passes=COALESCED)
    def test_compile_cpu_no_sync(self):
        self._test_compile(use_gpu=False, no_sync=True)

    @skip_if_rocm_multiprocess
    @skip_if_lt_x_gpu(2)
    @needs_triton
    @torch._inductor.config.patch(reorder_for_locality=False, reorder_for_peak_memory=False)
    def test_compile_gpu(self):
        self._test_compile(use_gpu=True, no_sync=False, checkpoint=False)

    @skip_if_rocm_multiprocess
    @skip_if_lt_x_gpu(2)
    @needs_triton
    @torch._inductor.config.patch(reorder_for_locality=False, reorder_for_peak_memory=False)
    def test_compile_gpu_ac(self):
        self._test_compile(use_gpu=True, no_sync=False, checkpoint=True)

    @skip_if_rocm_multiprocess
    @skip_if_lt_x_gpu(2)
    @needs_triton
    def test_compile_bf16(self):
        device = torch.device(accelerator(), self.rank % torch.accelerator.device_count())
        if not sm_is_or_higher_than(device, 8, 0):
            self.skipTest("bf16 needs compute capability 8.0")
        self._test_compile(use_gpu=True, no_sync=False, setup_func=with_comm_hook(compress_to_bf16))

    # Eager rounds a gradient to float16 and then divides it by the number of ranks. By
    # default, inductor divides first; if the result is too small for a normal float16, it
    # differs. PyTorch's test excludes inductor for this reason.
    @skip_if_rocm_multiprocess
    @skip_if_lt_x_gpu(2)
    @needs_triton
    @torch._inductor.config.patch(emulate_precision_casts=True)
    def test_compile_fp16(self):
        setup = with_comm_hook(ddp_default_hooks.fp16_compress_hook)
        self._test_compile(use_gpu=True, no_sync=False, setup_func=setup)

    @skip_if_rocm_multiprocess
    @skip_if_lt_x_gpu(2)
    @needs_triton
    def test_compile_backward_only(self):
        self._test_compile(use_gpu=True, no_sync=False, no_compile_forward=True)

    def _test_bucketing(self, init_process_group: bool = True, loop: int = 1) -> str:
        """The code of the last backward of `loop`: without gradients before it, or with them."""
        if init_process_group:
            self._init_process_group("cpu")
        torch.manual_seed(0)
        model = replicate(Net(), bucket_cap_mb=BUCKET_MB)
        compiled_replicate_model = torch.compile(model, backend=BACKEND, fullgraph=False)
        input = torch.randn([1, DIM])

        def bwd(loss: torch.Tensor) -> None:
            with compiled_autograd._enable(compiler_fn()):
                loss.backward()

        for i in range(loop):
            loss = compiled_replicate_model(input).sum()
            if i != loop - 1:
                bwd(loss)
        counters.clear()
        code = run_and_get_triton_code(functools.partial(bwd, loss=loss))
        self.assertEqual(counters["inductor"]["ddp_buckets"], BUCKETS, msg=f"{loop=}")
        return code

    # Inductor treats a captured backward as inference and would reorder it.
    @on_cpu
    @torch._inductor.config.patch(
        _fuse_ddp_communication_passes=COALESCED,
        reorder_for_locality=False,
        reorder_for_peak_memory=False,
        pattern_matcher=False,
    )
    def test_bucketing_coalesced_op(self):
        bucket = ["cpp_fused_", "torch.ops._c10d_functional.all_reduce_coalesced_.default("]
        self._check_buckets(self._test_bucketing(), bucket)
        self._check_buckets(self._test_bucketing(init_process_group=False, loop=2), bucket)

    @on_cpu
    @torch._inductor.config.patch(
        _fuse_ddp_communication_passes=CONCATENATED,
        reorder_for_locality=False,
        reorder_for_peak_memory=False,
        pattern_matcher=False,
    )
    def test_bucketing_concat_op(self):
        bucket = ["aten.flatten.using_ints(", "cpp_fused_", "torch.ops._c10d_functional.all_reduce_.default("]
        self._check_buckets(self._test_bucketing(), bucket)
        self._check_buckets(self._test_bucketing(init_process_group=False, loop=2), bucket)

    # -- What PyTorch's file does not have: the tests for two GPUs, on the CPU

    @on_cpu
    def test_compile_gpu_on_cpu(self):
        self._test_compile(use_gpu=False, no_sync=False)

    @on_cpu
    def test_compile_gpu_ac_on_cpu(self):
        self._test_compile(use_gpu=False, no_sync=False, checkpoint=True)

    @on_cpu
    def test_compile_bf16_on_cpu(self):
        self._test_compile(use_gpu=False, no_sync=False, setup_func=with_comm_hook(compress_to_bf16))

    @on_cpu
    @torch._inductor.config.patch(emulate_precision_casts=True)
    def test_compile_fp16_on_cpu(self):
        setup = with_comm_hook(ddp_default_hooks.fp16_compress_hook)
        self._test_compile(use_gpu=False, no_sync=False, setup_func=setup)

    @on_cpu
    def test_compile_backward_only_on_cpu(self):
        self._test_compile(use_gpu=False, no_sync=False, no_compile_forward=True)

    @requires_gloo()
    def test_compile_backward_only_in_old_mode_is_refused(self):
        """PyTorch had a separate mode for this. It would leave gradients unreduced."""
        self._init_process_group("cpu")
        torch._dynamo.config.optimize_ddp = "python_reducer_without_compiled_forward"
        model = replicate(Net())
        refused = self.assertRaisesRegex(RuntimeError, "not compatible with C\\+\\+ DDP Reducer")
        with refused, compiled_autograd._enable(compiler_fn()):
            model(torch.rand(1, DIM)).sum().backward()

    # -- What PyTorch's file does not check

    @contextlib.contextmanager
    def _gradient_sync(self, model: Any, sync: bool):
        """Without `sync`, the wrapper leaves gradients unreduced."""
        if isinstance(getattr(model, "_orig_mod", model), DDP):
            with contextlib.nullcontext() if sync else model.no_sync():
                yield
        else:
            model.set_requires_gradient_sync(sync)
            yield

    def _check_grads(self, nets: dict[str, Net], iteration: int, same_on_all_ranks: bool) -> None:
        reference, *_ = nets.values()
        for key, param in reference.named_parameters():
            for name, other in nets.items():
                grad = other.get_parameter(key).grad
                self.assertEqual(param.grad, grad, msg=f"gradient of {key} in {name}, iteration {iteration}")
            if key.endswith("weight"):  # that of a bias does not depend on the input here
                check = self.assertEqual if same_on_all_ranks else self.assertNotEqual
                grads = [torch.empty_like(param.grad) for _ in range(self.world_size)]
                dist.all_gather(grads, param.grad)
                check(*grads, msg=f"gradient of {key} on ranks 0 and 1, iteration {iteration}")

    def _check_buckets(self, code: str, bucket: list[str]) -> None:
        """The code has the lines of `bucket` once per bucket, and then all waits.

        Each kernel comes before the collective that sends its result, and no wait before
        the last collective.
        """
        order = FileCheck()
        for line in bucket * BUCKETS:
            order = order.check_not(WAIT).check(line)
        for _ in range(BUCKETS):
            order = order.check(WAIT)
        order.run(code)
        FileCheck().check_count(bucket[-1], BUCKETS, exactly=True).run(code)


class DDP_TP_Test(MultiProcessInductorTestCase):
    """In real ranks, where PyTorch's has a fake backend in one process."""

    @property
    def world_size(self) -> int:
        return 4

    @property
    def device_type(self) -> str:
        """The type of the accelerators, if there are enough and inductor can compile for them."""
        return accelerator() if at_least_x_gpu(self.world_size) and has_triton() else "cpu"

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @needs_cpp_compiler
    def test_ddp_tp(self):
        # With static shapes this works; PyTorch's test only asserts that it fails.
        device_type = self.device_type
        self._init_process_group(device_type)
        torch.manual_seed(0)
        net = Net().to(device_type)
        ref_model, compiled_replicate_model = nets = deepcopy(net), deepcopy(net)
        mesh_2d = init_device_mesh(device_type, (2, self.world_size // 2), mesh_dim_names=("dp", "tp"))
        tp_mesh, dp_mesh = mesh_2d["tp"], mesh_2d["dp"]
        styles = {"fc1": ColwiseParallel, "fc2": RowwiseParallel, "fc3": ColwiseParallel, "fc4": RowwiseParallel}
        for each in nets:
            parallelize_module(each, tp_mesh, {name: style() for name, style in styles.items()})
        ref_model = replicate(ref_model, device_mesh=dp_mesh, bucket_cap_mb=BUCKET_MB)
        compiled_replicate_model = replicate(compiled_replicate_model, device_mesh=dp_mesh, bucket_cap_mb=BUCKET_MB)
        compiled_replicate_model = torch.compile(compiled_replicate_model, backend=BACKEND, dynamic=False)

        batches = [torch.rand(1, DIM, generator=torch.Generator().manual_seed(n)) for n in range(2)]
        data = batches[dp_mesh.get_local_rank()].to(device_type)
        with cpp_reducer():
            ref_model(data).sum().backward()
        with compiled_autograd._enable(compiler_fn(dynamic=False), dynamic=False):
            loss = compiled_replicate_model(data).sum()
            loss.backward()
        net(torch.cat(batches).to(device_type)).sum().div(2).backward()
        self.assertGreater(counters["compiled_autograd"]["captures"], 0, "no backward was compiled")

        # `parameters()` shows none after a forward: `replicate` replaces DTensors by local tensors.
        states = map(replicate.state, nets)
        ref_params, params = (dict(zip(one._param_names, one._param_list, strict=True)) for one in states)
        for name, whole in net.named_parameters():
            where = f"gradient of {name}, rank {self.rank}"
            grad = params[name].grad
            self.assertEqual(ref_params[name].grad, grad, msg=f"{where}: eager and compiled")
            expected = self._shard(name, styles[name.split(".")[0]], whole.grad, tp_mesh)
            self.assertEqual(expected, grad, msg=f"{where}: one device and compiled")

    def _shard(self, name: str, style: type, grad: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """This rank's part: a Colwise layer is sharded by outputs, a Rowwise layer by inputs."""
        if style is ColwiseParallel:
            return grad.chunk(mesh.size(), dim=0)[mesh.get_local_rank()]
        return grad.chunk(mesh.size(), dim=1)[mesh.get_local_rank()] if name.endswith("weight") else grad


@contextlib.contextmanager
def cpp_reducer():
    """Models whose first step is in this context reduce gradients in C++, outside of any graph."""
    with torch._dynamo.config.patch(optimize_ddp=False):
        yield


def with_comm_hook(comm_hook: Callable) -> Callable[..., None]:
    def setup(*models: Any) -> None:
        for model in models:
            model.register_comm_hook(None, comm_hook)

    return setup


def compress_to_bf16(state, bucket):
    """`bf16_compress_hook` under a name that DDP does not refuse without NCCL: gloo sends bfloat16, too."""
    return ddp_default_hooks.bf16_compress_hook(state, bucket)


if __name__ == "__main__":
    run_tests()
