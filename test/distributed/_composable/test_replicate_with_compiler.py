# Owner(s): ["oncall: distributed"]
"""Compiled `replicate` and DDP: torch.compile for forward, compiled autograd for backward with its all-reduces.

The compiled models train next to an eager `replicate` with the C++ reducer, and must match its numbers. Tests named
`..._gpu`, `_bf16`, ... run on two accelerators; their names end in `_on_cpu` if they run on the CPU.

Graphs never come from a cache: each test traces, buckets and generates code itself. Compiled C++ kernels do come from
inductor's cache: the first run on a machine builds them, and a precompiled header that alone takes 10 seconds.
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
from typing import Any, ClassVar

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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
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

# A layer's weight is 1 MB, so that four layers make three buckets: the first is full with 1 MB, the others with 2.
# PyTorch's tests have the same plan with layers of 16 MB and buckets of 25, which takes three times as long.
DIM = 512
BUCKET_MB = 2
BUCKETS = 3

COALESCED = ["fuse_ddp_with_coalesced_op", "schedule_comm_wait"]
WAIT = "torch.ops._c10d_functional.wait_tensor.default"

CONCATENATED = ["fuse_ddp_with_concat_op", "schedule_comm_wait"]

CXX = os.environ.get("CXX", "g++")


needs_cpp_compiler = unittest.skipUnless(shutil.which(CXX), f"inductor needs a C++ compiler, and there is no {CXX}")


def on_cpu(test: Callable) -> Callable:
    """A test on the CPU, for which nobody has to lease an accelerator."""
    return requires_gloo()(needs_cpp_compiler(test))


def needs_two_gpus(test: Callable) -> Callable:
    needs_triton = lazy_skip_if(lambda: not has_triton(), "inductor needs Triton, and support for it here")
    return skip_if_rocm_multiprocess(skip_if_lt_x_gpu(2)(needs_triton(test)))


def accelerator() -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device.type


# Inductor treats a captured backward as inference and would reorder it. PyTorch's tests disable this, too.
IN_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}


def bucketing_by(passes: list[str]) -> Callable[[Callable], Callable]:
    """Build buckets by `passes`, and disable passes that would change the order or shapes of operations."""
    return torch._inductor.config.patch(_fuse_ddp_communication_passes=passes, pattern_matcher=False, **IN_ORDER)


def compress_to_bf16(state, bucket):
    """`bf16_compress_hook` under a name that DDP does not refuse if torch has no NCCL: gloo sends bfloat16, too."""
    return default_hooks.bf16_compress_hook(state, bucket)


class Net(nn.Module):
    """Four square linear layers, the first one optionally checkpointed."""

    def __init__(self, width: int, checkpoint: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, width)
        self.fc4 = nn.Linear(width, width)
        self.use_checkpoint = checkpoint

    def forward(self, x):
        x = checkpoint(self.fc1, x, use_reentrant=False) if self.use_checkpoint else self.fc1(x)
        return self.fc4(self.fc3(self.fc2(x)))


def compile_backward(dynamic: bool = True) -> contextlib.AbstractContextManager[None]:
    """Compile backward passes in this context by inductor. They fail instead of falling back to eager."""
    compile_graph = functools.partial(
        torch.compile, backend=BACKEND, fullgraph=True, dynamic=None if dynamic else False
    )
    return compiled_autograd._enable(compile_graph, dynamic=dynamic)


@functools.cache
def compile_once() -> None:
    """Do here, for all ranks, what the first step of a process does: try the vector instructions, build the patterns.

    It takes a rank as long as a third of a test. With an accelerator, this only imports: fake tensors ask CUDA's driver
    for its devices in C++ (`_ensureCUDADeviceGuardSet`), which does not survive a fork.
    """
    importlib.import_module("torch._inductor.compile_fx")
    if shutil.which(CXX) is not None and not at_least_x_gpu(1):
        # Autograd starts its threads now: none. Once fake tensors have been used, a build with CUDA seems to have eight
        # devices, each of which would get a thread with the first backward pass.
        torch.ones(1, requires_grad=True).backward()
        with compile_backward():
            torch.compile(nn.Linear(2, 2), backend=BACKEND)(torch.ones(1, 2)).sum().backward()
        torch._dynamo.reset()


# A worker of pytest also imports the file if other workers run its tests: there, the first test does it.
if "PYTEST_VERSION" not in os.environ:
    compile_once()


class MultiProcessInductorTestCase(MultiProcessTestCase):
    """A test case whose ranks compile without graph caches."""

    def setUp(self) -> None:
        super().setUp()
        compile_once()
        self._spawn_processes()

    def start(self, device_type: str) -> None:
        """Set up a rank. Each test calls this first; as it has its own processes, nothing needs to be restored."""
        torch._inductor.config.fx_graph_cache = False
        torch._functorch.config.enable_autograd_cache = False
        torch._dynamo.config.optimize_ddp = "python_reducer"
        if device_type != "cpu":
            torch.accelerator.set_device_index(self.rank % torch.accelerator.device_count())
        backend = dist.get_default_backend_for_device(device_type)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, store=store)

    def from_ranks(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return gathered


class Training:
    """One of the models that train side by side: `net`, and `model`, which wraps it and may be compiled."""

    def __init__(self, name: str, net: Net, model: Any, backward: Callable[[], contextlib.AbstractContextManager]):
        self.name = name
        self.params = dict(net.named_parameters())
        self.model = model
        self.backward = backward
        self.optimizer = torch.optim.Adam(model.parameters())

    def run(self, batch: torch.Tensor, sync: bool) -> None:
        """Forward and backward. Without `sync`, the wrapper leaves gradients unreduced."""
        with self._gradient_sync(sync), self.backward():
            self.model(batch).sum().backward()

    @contextlib.contextmanager
    def _gradient_sync(self, sync: bool):
        if isinstance(getattr(self.model, "_orig_mod", self.model), DDP):
            with contextlib.nullcontext() if sync else self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(sync)
            yield

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextlib.contextmanager
def cpp_reducer():
    """DDP and replicate models whose first step is in this context reduce gradients in C++, outside of any graph."""
    with torch._dynamo.config.patch(optimize_ddp=False):
        yield


class ReplicateTest(MultiProcessInductorTestCase):
    """Compiled `replicate` and DDP on two ranks."""

    @property
    def world_size(self) -> int:
        return 2

    def _test_compile(
        self,
        *,
        device_type: str,
        no_sync: bool = False,
        comm_hook: Callable | None = None,
        compile_forward: bool = True,
        checkpoint: bool = False,
    ) -> None:
        self.start(device_type)
        torch.manual_seed(123)
        net = Net(DIM, checkpoint).to(device_type)
        trainings = self._trainings(net, comm_hook, compile_forward)
        # Without sync, each rank keeps its own gradients in the first iteration, and the second adds to them.
        for iteration in range(2):
            torch.manual_seed(123 + self.rank + self.world_size * iteration)  # no batch occurs twice
            batch = torch.randn(1, DIM).to(device_type)
            sync = not no_sync or iteration == 1
            for training in trainings:
                training.run(batch, sync)
            self._check_grads(trainings, iteration, same_on_all_ranks=sync)
            if sync:
                for training in trainings:
                    training.step()
        self._check_params(trainings)
        self.assertGreater(counters["compiled_autograd"]["captures"], 0, "no backward was compiled")

    def _trainings(self, net: Net, comm_hook: Callable | None, compile_forward: bool) -> list[Training]:
        nets = net, deepcopy(net), deepcopy(net)
        models = eager, replicated, ddp = (
            replicate(nets[0], bucket_cap_mb=BUCKET_MB),
            replicate(nets[1], bucket_cap_mb=BUCKET_MB),
            DDP(nets[2], bucket_cap_mb=BUCKET_MB),
        )
        if comm_hook is not None:
            for model in models:
                model.register_comm_hook(None, comm_hook)
        if compile_forward:
            replicated = torch.compile(replicated, backend=BACKEND, fullgraph=False)
            ddp = torch.compile(ddp, backend=BACKEND, fullgraph=True)
        return [
            Training("eager replicate", nets[0], eager, cpp_reducer),
            Training("compiled replicate", nets[1], replicated, compile_backward),
            Training("compiled DDP", nets[2], ddp, compile_backward),
        ]

    def _check_grads(self, trainings: list[Training], iteration: int, same_on_all_ranks: bool) -> None:
        reference, *others = trainings
        for name, param in reference.params.items():
            for other in others:
                grad = other.params[name].grad
                self.assertEqual(param.grad, grad, msg=f"gradient of {name} in {other.name}, iteration {iteration}")
            if name.endswith("weight"):  # a bias gradient of this linear net does not depend on the input
                check = self.assertEqual if same_on_all_ranks else self.assertNotEqual
                mine, theirs = self.from_ranks(param.grad)
                check(mine, theirs, msg=f"gradient of {name} on ranks 0 and 1, iteration {iteration}")

    def _check_params(self, trainings: list[Training]) -> None:
        reference, *others = trainings
        for name, param in reference.params.items():
            for other in others:
                self.assertEqual(param, other.params[name], msg=f"{name} of {other.name} at the end")

    @on_cpu
    @torch._inductor.config.patch(_fuse_ddp_communication_passes=COALESCED)
    def test_compile_cpu(self):
        self._test_compile(device_type="cpu")

    @on_cpu
    @torch._inductor.config.patch(_fuse_ddp_communication_passes=COALESCED)
    def test_compile_cpu_no_sync(self):
        self._test_compile(device_type="cpu", no_sync=True)

    @needs_two_gpus
    @torch._inductor.config.patch(IN_ORDER)
    def test_compile_gpu(self):
        self._test_compile(device_type=accelerator())

    @on_cpu
    def test_compile_gpu_on_cpu(self):
        self._test_compile(device_type="cpu")

    @needs_two_gpus
    @torch._inductor.config.patch(IN_ORDER)
    def test_compile_gpu_ac(self):
        self._test_compile(device_type=accelerator(), checkpoint=True)

    @on_cpu
    def test_compile_gpu_ac_on_cpu(self):
        self._test_compile(device_type="cpu", checkpoint=True)

    @needs_two_gpus
    def test_compile_bf16(self):
        device = torch.device(accelerator(), self.rank % torch.accelerator.device_count())
        if not sm_is_or_higher_than(device, 8, 0):
            self.skipTest("bf16 needs compute capability 8.0")
        self._test_compile(device_type=accelerator(), comm_hook=compress_to_bf16)

    @on_cpu
    def test_compile_bf16_on_cpu(self):
        self._test_compile(device_type="cpu", comm_hook=compress_to_bf16)

    # Eager rounds a gradient to float16 and then divides it by the number of ranks. By default, inductor divides first;
    # if the result is too small for a normal float16, it differs. PyTorch's test excludes inductor for this reason.
    @needs_two_gpus
    @torch._inductor.config.patch(emulate_precision_casts=True)
    def test_compile_fp16(self):
        self._test_compile(device_type=accelerator(), comm_hook=default_hooks.fp16_compress_hook)

    @on_cpu
    @torch._inductor.config.patch(emulate_precision_casts=True)
    def test_compile_fp16_on_cpu(self):
        self._test_compile(device_type="cpu", comm_hook=default_hooks.fp16_compress_hook)

    # PyTorch had a separate mode for this, "python_reducer_without_compiled_forward". Now "python_reducer" does it.
    @needs_two_gpus
    def test_compile_backward_only(self):
        self._test_compile(device_type=accelerator(), compile_forward=False)

    @on_cpu
    def test_compile_backward_only_on_cpu(self):
        self._test_compile(device_type="cpu", compile_forward=False)

    @requires_gloo()
    def test_compile_backward_only_in_old_mode_is_refused(self):
        """The old mode would leave gradients unreduced."""
        self.start("cpu")
        torch._dynamo.config.optimize_ddp = "python_reducer_without_compiled_forward"
        model = replicate(Net(2))
        with self.assertRaisesRegex(RuntimeError, "not compatible with C\\+\\+ DDP Reducer"), compile_backward():
            model(torch.rand(1, 2)).sum().backward()

    @on_cpu
    @bucketing_by(COALESCED)
    def test_bucketing_coalesced_op(self):
        self._test_bucketing(["cpp_fused_", "torch.ops._c10d_functional.all_reduce_coalesced_.default("])

    @on_cpu
    @bucketing_by(CONCATENATED)
    def test_bucketing_concat_op(self):
        self._test_bucketing(
            ["aten.flatten.using_ints(", "cpp_fused_", "torch.ops._c10d_functional.all_reduce_.default("]
        )

    def _test_bucketing(self, bucket: list[str]) -> None:
        """Check that the backward's code has the lines of `bucket` once per bucket, and then all waits.

        Each kernel must come before the collective that sends its result, and no wait before the last collective.
        """
        self.start("cpu")
        torch.manual_seed(0)
        net = Net(DIM)
        for grads_exist in (False, True):
            model = torch.compile(replicate(deepcopy(net), bucket_cap_mb=BUCKET_MB), backend=BACKEND, fullgraph=False)
            code = self._backward_code(model, grads_exist)
            self.assertEqual(counters["inductor"]["ddp_buckets"], BUCKETS, msg=f"{grads_exist=}")
            order = FileCheck()
            for line in bucket * BUCKETS:
                order = order.check_not(WAIT).check(line)
            for _ in range(BUCKETS):
                order = order.check(WAIT)
            order.run(code)
            FileCheck().check_count(bucket[-1], BUCKETS, exactly=True).run(code)

    def _backward_code(self, model: Any, grads_exist: bool) -> str:
        def backward(loss: torch.Tensor) -> None:
            with compile_backward():
                loss.backward()

        batch = torch.randn(1, DIM)
        if grads_exist:
            backward(model(batch).sum())
        loss = model(batch).sum()
        counters.clear()
        return run_and_get_triton_code(backward, loss)


class DDP_TP_Test(MultiProcessInductorTestCase):
    """Compiled `replicate` together with tensor parallelism."""

    PLAN: ClassVar = {"fc1": ColwiseParallel, "fc2": RowwiseParallel, "fc3": ColwiseParallel, "fc4": RowwiseParallel}

    @property
    def world_size(self) -> int:
        return 4

    @property
    def device_type(self) -> str:
        """The type of the accelerators, if there are enough for the ranks and inductor can compile for them."""
        return accelerator() if at_least_x_gpu(self.world_size) and has_triton() else "cpu"

    @needs_cpp_compiler
    def test_ddp_tp(self):
        """With static shapes this works; PyTorch's test only asserts that it fails."""
        device_type = self.device_type
        self.start(device_type)
        mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        net = Net(DIM).to(device_type)
        nets = deepcopy(net), deepcopy(net)
        for parallel in nets:
            parallelize_module(parallel, mesh["tp"], {name: style() for name, style in self.PLAN.items()})
        eager, compiled = (replicate(parallel, device_mesh=mesh["dp"], bucket_cap_mb=BUCKET_MB) for parallel in nets)
        compiled = torch.compile(compiled, backend=BACKEND, dynamic=False)

        dp_rank = mesh.get_local_rank("dp")
        batches = [torch.rand(1, DIM, generator=torch.Generator().manual_seed(n)) for n in range(2)]
        batch = batches[dp_rank].to(device_type)
        with cpp_reducer():
            eager(batch).sum().backward()
        with compile_backward(dynamic=False):
            compiled(batch).sum().backward()
        net(torch.cat(batches).to(device_type)).sum().div(2).backward()
        self.assertGreater(counters["compiled_autograd"]["captures"], 0, "no backward was compiled")
        # `parameters()` shows none after a forward: `replicate` replaces DTensors by local tensors.
        states = map(replicate.state, nets)
        eager_params, params = (dict(zip(one._param_names, one._param_list, strict=True)) for one in states)
        for name, whole in net.named_parameters():
            where = f"gradient of {name}, rank {self.rank}"
            grad = params[name].grad
            self.assertEqual(eager_params[name].grad, grad, msg=f"{where}: eager and compiled")
            expected = self._shard(name, whole.grad, mesh["tp"])
            self.assertEqual(expected, grad, msg=f"{where}: one device and compiled")

    def _shard(self, name: str, grad: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """This rank's part under the plan: a Colwise layer is sharded by outputs, a Rowwise layer by inputs."""
        layer, kind = name.split(".")
        if self.PLAN[layer] is ColwiseParallel:
            return grad.chunk(2, dim=0)[mesh.get_local_rank()]
        return grad.chunk(2, dim=1)[mesh.get_local_rank()] if kind == "weight" else grad


if __name__ == "__main__":
    run_tests()
