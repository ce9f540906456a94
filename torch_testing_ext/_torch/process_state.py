"""The parts of torch that starting, watching and leaving ranks needs, in processes and in threads."""

import gc
import inspect
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# --------------------------------------------------------------------------------------------------------------------
# The parts of torch that starting, watching and leaving ranks need.


def made_groups_before() -> bool:
    """Has this process, or one that it was forked from, ever made a process group of gloo or NCCL?

    Their backends number the groups of a process in C++, and forked processes go on counting. `pg_config` of
    `_dump_fr_trace`: 2.11 to 2.15.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace", None)
    return dump is not None and bool(pickle.loads(dump(False, False, False)).get("pg_config"))


def only_gloo() -> bool:
    """Do all process groups of this process have only gloo backends? `_world.pg_map`: all versions."""
    import torch.distributed as dist

    names = {backend for backend, _ in dist.distributed_c10d._world.pg_map.values()}
    kinds = {part.rpartition(":")[2] for name in names for part in str(name).split(",")}
    return kinds <= {"gloo"}


def wait_without_end() -> None:
    """Set the default time-out of process groups made from now on to one day: a rank is being debugged.

    `_get_default_timeout`, all versions.
    """
    import torch.distributed as dist

    dist.distributed_c10d._get_default_timeout = lambda backend: timedelta(days=1)


def reset_dynamo() -> None:
    """Forget what torch.compile has compiled, if it ran at all. `torch._dynamo.reset`, all versions."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def end_compile_workers() -> None:
    """End inductor's pool of compile processes, which the interpreter's tear-down would have ended.

    `torch._inductor.async_compile.shutdown_compile_workers`, all versions.
    """
    pool = sys.modules.get(COMPILE_POOL)
    if pool is not None:
        pool.shutdown_compile_workers()


def fake_process_group() -> Any:
    """The class of process groups that do not communicate: 2.11 to 2.15."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup


def register_fake_backend() -> None:
    """Register backend="fake", whose groups do not communicate. Registering twice is harmless.

    `FakeProcessGroup._create_internal`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    def make(common: Any, options: Any) -> Any:
        return fake_process_group()._create_internal(common.group_rank, common.group_size, options)

    dist.Backend.register_backend("fake", make, extended_api=True, devices=["cpu", "cuda", "hpu", "xpu"])


def options_of_alike_ranks() -> Any:
    """Options of a fake group that computes as if all ranks had the values of this one: 2.15; None where torch cannot.

    It does not know whether they have.
    """
    if not hasattr(getattr(fake_process_group(), "Options", None), "simulate_uniform_ranks"):
        return None
    options = fake_process_group().Options()
    options.simulate_uniform_ranks = True
    return options


def make_groups_fake(on_made: Callable[[], None]) -> None:
    """From now on, let each group that this process makes have the fake backend, whatever was asked for.

    Its operations are not put together, as those of gloo are not. `_new_process_group_helper`: all versions.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    create = c10d._new_process_group_helper
    signature = inspect.signature(create)

    def create_fake(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(backend="fake", backend_options=options_of_alike_ranks())
        made = create(*bound.args, **bound.kwargs)
        on_made()
        return made

    fake_process_group().supports_coalescing = False
    c10d._new_process_group_helper = create_fake


def abort_process_groups() -> None:
    """Abort all process groups of this process, including the collectives that run in them.

    `_abort_process_group`: 2.6 to 2.15. Backends without an abort (gloo) stay as they are.
    """
    import torch.distributed as dist

    dist.distributed_c10d._abort_process_group()


def launcher_store(host: str, port: int, makes_it: bool, timeout: float) -> Any:
    """Return the store of a launch on several machines. `makes_it`: this process does; otherwise, it is there."""
    import torch.distributed as dist

    c10d: Any = dist  # its type stubs lack what comes from C++
    limit = timedelta(seconds=timeout)
    # A group that the user makes by `env://` in this process may share it.
    store = c10d.TCPStore(host, port, None, makes_it, limit, wait_for_workers=False, multi_tenant=True)
    return c10d.PrefixStore("torch_testing_ext", store)


# -- whose fault an error is: most errors of collectives are a RuntimeError, and only the message tells them apart. All
# of 2.11 to 2.15.

# The process at the other end of a collective or a store has gone.
LOST_PEER = re.compile(
    # gloo's pairs and TCPStore's sockets, with the system's words for the errno
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|connection lost"
    # NCCL, as ProcessGroupNCCL reports it
    r"|remote process exited|NCCL.*(remote error|communicator was aborted)"
    # TCPStore, and the exchange of NCCL's unique id over it
    r"|recvValue failed|sendBytes failed|socket (timeout|error)|failed to recv",
    re.IGNORECASE,
)
# A wait for other ranks was given up, by gloo, TCPStore or HashStore ("Wait timeout").
GAVE_UP = re.compile(r"timed out waiting|timed out after .* waiting|wait timeout", re.IGNORECASE)
# A store or a backend could not listen.
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


# --------------------------------------------------------------------------------------------------------------------
# A world of process groups for each thread, for ranks that are threads.


def world_class() -> type:
    """Return the class of c10d's state about its groups. `distributed_c10d._World`: 2.11 to 2.15."""
    return dist.distributed_c10d._World


def get_world() -> Any:
    """Return c10d's state about its groups. `distributed_c10d._world`: 2.11 to 2.15."""
    return dist.distributed_c10d._world


def set_world(world: Any) -> None:
    dist.distributed_c10d._world = world


def isolate_threads(isolated: bool) -> None:
    """Give each thread its own registry of groups, or not. `_set_thread_isolation_mode`: 2.11 to 2.15."""
    torch._C._distributed_c10d._set_thread_isolation_mode(isolated)  # type: ignore[attr-defined]


def backend_plugin(name: str) -> Any:
    """Return the plugin that creates the groups of a registered backend. `Backend._plugins`: 2.11 to 2.15."""
    return dist.Backend._plugins[name.upper()]


def set_backend_plugin(name: str, plugin: Any) -> None:
    dist.Backend._plugins[name.upper()] = plugin


def finished_work(result: Any) -> dist.Work:
    """Return a completed Work. `_create_work_from_future`: 2.11 to 2.15."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined, unused-ignore]
    return work


@contextmanager
def one_sharding_at_a_time() -> Iterator[None]:
    """Serialise the sharding propagation of DTensor, if it is imported: its fake tensors are not thread-safe.

    `ShardingPropagator._fake_mode_lock` since 2.12, by default a lock without effect; 2.11 has none.
    """
    module: Any = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if not hasattr(getattr(module, "ShardingPropagator", None), "_fake_mode_lock"):
        yield
        return
    with mock.patch.object(module.ShardingPropagator, "_fake_mode_lock", threading.Lock()):
        yield


# --------------------------------------------------------------------------------------------------------------------
# State of a process beyond tensors: modes of functions, the compiler's caches, the collector of cyclic garbage.

# Takes seconds to import: DDP, FSDP and operators of DTensor do that when they are first used. 2.11 to 2.15.
DYNAMO = "torch._dynamo"
INDUCTOR = "torch._inductor.compile_fx"
# Imported with whatever starts the pool of compile processes. All versions.
COMPILE_POOL = "torch._inductor.async_compile"


# -- modes


def torch_function_modes() -> int:
    """Count the active torch function modes (a default device is one). `_len_torch_function_stack`: 2.11 to 2.15."""
    return torch._C._len_torch_function_stack()


def pop_torch_function_mode() -> None:
    """Remove the innermost torch function mode. `_pop_torch_function_stack`: 2.11 to 2.15."""
    torch._C._pop_torch_function_stack()


def torch_function_state() -> Any:
    """Is `__torch_function__` enabled? `_get_torch_function_state`: 2.11 to 2.15."""
    return torch._C._get_torch_function_state()  # type: ignore[attr-defined, unused-ignore]


def set_torch_function_state(state: Any) -> None:
    """Restore a result of `torch_function_state`. `_set_torch_function_state`: 2.11 to 2.15."""
    torch._C._set_torch_function_state(state)  # type: ignore[attr-defined, unused-ignore]


# -- the compiler


def forget_compiled() -> None:
    """Clear caches and counters. `torch._dynamo.reset`, `torch._dynamo.utils.counters`: 2.11 to 2.15."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def strict_dynamo() -> AbstractContextManager[None]:
    """A context in which dynamo raises errors instead of falling back. `torch._dynamo.config.patch`: 2.11 to 2.15."""
    import torch._dynamo

    patch: AbstractContextManager[None] = torch._dynamo.config.patch(
        raise_on_ctx_manager_usage=True, suppress_errors=False, log_compilation_metrics=False
    )
    return patch


def without_compiled_autograd() -> AbstractContextManager[None]:
    """A context in which backward passes are not compiled. `compiled_autograd._disable`: 2.11 to 2.15."""
    from torch._dynamo import compiled_autograd

    context: AbstractContextManager[None] = compiled_autograd._disable()
    return context


# -- the collector: importing torch leaves some hundred thousand objects that stay


def postpone_collection() -> None:
    """Have the next full collection come later: one takes a tenth of a second, and the last import may be at fault.

    All objects become old ones, and the collector counts from zero again. Nothing is exempt from collection.
    """
    if not gc.get_freeze_count():  # what somebody has exempted stays exempt
        gc.freeze()
        gc.unfreeze()


_exempted = False


def exempt_imported(garbage: int | None = 1) -> None:
    """Exempt all that exists from collection, so that the collectors of forked processes do not write to shared pages.

    Also, the collections at the interpreter's end would otherwise take a quarter of the time of a short program.
    `garbage`: the oldest generation from which garbage is collected first, 2 for all. With None, none is: in a forked
    process, finalizers would act on what its parent has.
    """
    global _exempted
    if garbage is not None:
        gc.collect(garbage)
    gc.freeze()
    _exempted = True


def has_exempted_imported() -> bool:
    """Has this process, or the one that it was forked from, exempted what it had imported?

    `gc.get_freeze_count` would count all of these objects, which takes 10 ms.
    """
    return _exempted
