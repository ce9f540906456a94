"""Changes of torch as a future release might make them, each with the contract that must notice it."""

import functools
import gc
import importlib
import inspect
import os
import pickle
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

C10D: Any = dist.distributed_c10d
MODULE: Any = torch._C._distributed_c10d


def renamed(function: Any, **names: str) -> None:
    """Let a function use other names, of globals or attributes."""
    target = inspect.unwrap(function)
    co_names = tuple(names.get(name, name) for name in target.__code__.co_names)
    target.__code__ = target.__code__.replace(co_names=co_names)


def with_schemas(change: Callable[[str, list[Any]], None]) -> None:
    """Let the dispatcher tell other arguments of c10d's operations."""
    ask = torch._C._jit_get_all_schemas

    def schemas() -> list[Any]:
        found: list[Any] = []
        for schema in ask():
            arguments = list(schema.arguments)
            change(schema.name.partition("::")[2] if schema.name.startswith("c10d::") else "", arguments)
            found.append(SimpleNamespace(name=schema.name, arguments=arguments))
        return found

    torch._C._jit_get_all_schemas = schemas  # type: ignore[assignment]


def argument(name: str, kind: str) -> Any:
    return SimpleNamespace(name=name, type=kind)


def one_more_argument() -> None:
    def change(name: str, arguments: list[Any]) -> None:
        if name == "allreduce_":
            arguments.insert(3, argument("priority", "int"))

    with_schemas(change)


def splits_change_places() -> None:
    def change(name: str, arguments: list[Any]) -> None:
        if name == "alltoall_base_":
            arguments[3], arguments[4] = arguments[4], arguments[3]

    with_schemas(change)


def async_op_comes_last() -> None:
    def change(name: str, arguments: list[Any]) -> None:
        if name == "barrier":
            arguments[3] = argument("stream", "int")

    with_schemas(change)


def new_operation() -> None:
    ask = torch._C._jit_get_all_schemas
    group = argument("process_group", "__torch__.torch.classes.c10d.ProcessGroup")
    new = SimpleNamespace(name="c10d::ring_reduce_", arguments=[argument("tensor", "Tensor"), group])
    torch._C._jit_get_all_schemas = lambda: [*ask(), new]  # type: ignore[list-item]


def with_dump(change: Callable[[dict[str, Any]], None]) -> None:
    """Let the recorder leave other entries."""
    dump = MODULE._dump_fr_trace

    def changed(*args: Any, **kwargs: Any) -> bytes:
        content = pickle.loads(dump(*args, **kwargs))
        for entry in content.get("entries", ()):
            change(entry)
        return pickle.dumps(content)

    MODULE._dump_fr_trace = changed


def other_key_of_frames() -> None:
    def change(entry: dict[str, Any]) -> None:
        entry["frames"] = [{**frame, "file": frame.pop("filename")} for frame in entry["frames"]]

    with_dump(change)


def with_thread_names(change: Callable[[str], str]) -> None:
    """Let threads of C++ have other names."""
    read = Path.read_text

    def changed(path: Path, *args: Any, **kwargs: Any) -> str:
        text = read(path, *args, **kwargs)
        return change(text) if path.name == "comm" else text

    Path.read_text = changed  # type: ignore[method-assign]


def other_wait_of_gloo() -> None:
    read = Path.read_text

    def changed(path: Path, *args: Any, **kwargs: Any) -> str:
        text = read(path, *args, **kwargs)
        return text.replace(" 0x40 0xa ", " 0x80 0xa ") if path.name == "syscall" else text

    Path.read_text = changed  # type: ignore[method-assign]


def with_texts(change: Callable[[str], str]) -> None:
    """Let the errors of works have other texts."""
    wait = dist.Work.wait

    def changed(work: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return wait(work, *args, **kwargs)
        except RuntimeError as error:
            raise RuntimeError(change(str(error))) from None

    dist.Work.wait = changed  # type: ignore[method-assign, assignment]


def other_method_for_votes() -> None:
    from torch.distributed.pipelining.stage import PipelineStage

    stage: Any = PipelineStage
    stage._warmup_vote = stage._warmup_forward_vote
    del stage._warmup_forward_vote


def other_function_of_join() -> None:
    from torch.distributed.algorithms.join import Join

    function = inspect.unwrap(Join.notify_join_context)
    function.__code__ = function.__code__.replace(co_name="notify_context")


def other_argument_of_gathers() -> None:
    from torch.distributed import _functional_collectives as functional

    def all_gather_tensor(self: Any, dim: int, group: Any, tag: str = "") -> Any:
        return None

    code = all_gather_tensor.__code__.replace(co_filename=functional.__file__)
    all_gather_tensor.__code__ = code
    functional.all_gather_tensor = all_gather_tensor  # type: ignore[assignment]


def other_numbers_of_types() -> None:
    ask = dist.Work._get_op_type  # type: ignore[attr-defined]
    dist.Work._get_op_type = lambda work: int(ask(work)) + 1  # type: ignore[attr-defined]


def other_numbers_of_reductions() -> None:
    operations: Any = dist.ReduceOp
    operations.MIN, operations.MAX = operations.MAX, operations.MIN


def other_argument_of_creation() -> None:
    create = C10D._new_process_group_helper

    @functools.wraps(create)
    def changed(*args: Any, pg_name: Any = None, **kwargs: Any) -> Any:
        return create(*args, **kwargs)

    signature = inspect.signature(create)
    parameters = [
        each.replace(name="pg_name") if each.name == "group_name" else each for each in signature.parameters.values()
    ]
    changed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    C10D._new_process_group_helper = changed


def other_function_for_creation() -> None:
    C10D._create_group = C10D._new_process_group_helper
    for function in (C10D.init_process_group, C10D._new_group_with_tag):
        renamed(function, _new_process_group_helper="_create_group")


def other_key_of_errors() -> None:
    import logging

    from torch_testing_ext._torch.groups import collective_errors

    def change(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, dict):
            record.msg = {("exception" if key == "error" else key): value for key, value in record.msg.items()}
        return True

    collective_errors.logger_of_errors().addFilter(change)


def gradients_become_zeros() -> None:
    zero_grad: Any = torch.optim.Optimizer.zero_grad
    target = inspect.unwrap(zero_grad)
    target.__defaults__ = (False,)


def other_function_for_differences() -> None:
    from torch.testing import _comparison

    _comparison.find_differences = _comparison.not_close_error_metas  # type: ignore[attr-defined]
    renamed(_comparison.assert_close, not_close_error_metas="find_differences")


def other_mark_of_schedulers() -> None:
    from torch.optim import lr_scheduler

    initial_step = lr_scheduler.LRScheduler.__init__

    @functools.wraps(initial_step)
    def changed(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        initial_step(self, optimizer, *args, **kwargs)
        del optimizer.__dict__["step"]._wrapped_by_lr_sched

    lr_scheduler.LRScheduler.__init__ = changed  # type: ignore[method-assign]


def moved_function() -> None:
    del torch._C._dispatch_keyset_full_after


def other_order_of_messages() -> None:
    send: Any = dist.ProcessGroup.send
    group: Any = dist.ProcessGroup

    def changed(self: Any, tensors: Any, tag: int, dstRank: int) -> Any:
        return send(self, tensors, dstRank, tag)

    changed.__doc__ = send.__doc__.replace("dstRank: typing.SupportsInt", "tag_: typing.SupportsInt", 1)
    group.send = changed


def recoded(function: Any, **changes: Any) -> None:
    """Let the code of a function have another name, or be in another file."""
    target = inspect.unwrap(function)
    target.__code__ = target.__code__.replace(**changes)


def moved_folder(name: str) -> None:
    """Let the functions of a package be in files elsewhere."""
    importlib.import_module(name)
    folder = os.path.join("", *name.split("."), "")
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and folder in function.__code__.co_filename:
            function.__code__ = in_other_folder(function.__code__, folder)


def in_other_folder(code: types.CodeType, folder: str) -> types.CodeType:
    consts = (in_other_folder(each, folder) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    file = code.co_filename.replace(folder, f"{folder.rstrip(os.sep)}_v2{os.sep}")
    return code.replace(co_filename=file, co_consts=tuple(consts))


def other_function_of_backwards() -> None:
    recoded(torch.autograd.graph._engine_run_backward, co_name="_run_engine")


def other_files_of_ddp() -> None:
    from torch.distributed import utils
    from torch.nn.parallel import DistributedDataParallel

    for function in (
        *(DistributedDataParallel.__init__, utils._sync_module_states, utils._sync_params_and_buffers),
        utils._verify_param_shape_across_processes,
    ):
        recoded(function, co_filename=os.path.join("torch", "nn", "parallel", "verification.py"))


def other_hooks_of_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    register = ddp.register_comm_hook

    def changed(model: Any, *args: Any) -> None:
        register(model, *args)
        model._registered_comm_hooks = model.__dict__.pop("_comm_hooks")

    ddp.register_comm_hook = changed


def other_function_that_learns_shapes() -> None:
    from torch.distributed.pipelining.stage import PipelineStage

    stage: Any = PipelineStage
    for name in ("_forward_metadata_inference", "_shape_inference"):
        if hasattr(stage, name):
            stage._infer_shapes = getattr(stage, name)
            delattr(stage, name)


def other_text_of_a_port() -> None:
    stores: Any = dist
    store = stores.TCPStore

    def changed(*args: Any, **kwargs: Any) -> Any:
        try:
            return store(*args, **kwargs)
        except RuntimeError:
            raise RuntimeError("The server socket could not be bound: another process has it.") from None

    stores.TCPStore = changed


def other_text_of_dtensor() -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    for function in vars(ShardingPropagator).values():
        if isinstance(function, types.FunctionType):
            words = " does not have a sharding strategy registered."
            consts = tuple(" has no strategy." if each == words else each for each in function.__code__.co_consts)
            recoded(function, co_consts=consts)


def ranks_change_places() -> None:
    def change(name: str, arguments: list[Any]) -> None:
        if name == "send":
            arguments[2], arguments[3] = arguments[3], arguments[2]

    with_schemas(change)


def other_names_of_groups() -> None:
    name_of = C10D._process_group_name
    C10D._process_group_name = lambda ranks, *args, **kwargs: f"g{name_of(ranks, *args, **kwargs)}"


# By what changes: how, and the contract that is broken then, with its parameters.
MUTATIONS: Mapping[str, tuple[Callable[[], None], str, Mapping[str, Any]]] = {
    "c10d::allreduce_ has one more argument": (
        one_more_argument,
        "test_arguments_of_operations",
        {"name": "allreduce_"},
    ),
    "the splits of alltoall_base_ change places": (
        splits_change_places,
        "test_arguments_of_operations",
        {"name": "alltoall_base_"},
    ),
    "async_op is no longer before the time-out": (
        async_op_comes_last,
        "test_async_op_before_timeout",
        {"name": "barrier"},
    ),
    "an operation is new": (new_operation, "test_no_other_operations", {}),
    "the recorder's entries have a new key": (
        lambda: with_dump(lambda entry: entry.update(stream_id=0)),
        "test_keys_of_the_recorder",
        {},
    ),
    "a key of the recorder is renamed": (
        lambda: with_dump(lambda entry: entry.update(entry_id=entry.pop("record_id"))),
        "test_keys_of_the_recorder",
        {},
    ),
    "the recorder's types have other names": (
        lambda: with_dump(lambda entry: entry.update(input_dtypes=["f32"])),
        "test_values_of_the_recorder",
        {},
    ),
    "the recorder's frames have another key": (other_key_of_frames, "test_values_of_the_recorder", {}),
    "gloo's threads have other names": (
        lambda: with_thread_names(lambda name: name.replace("pt_gloo_runloop", "gloo_worker")),
        "test_threads_of_gloo",
        {},
    ),
    "the thread of a store has another name": (
        lambda: with_thread_names(lambda name: name.replace("pt_tcpstore_uv", "store_server")),
        "test_thread_of_a_store",
        {},
    ),
    "gloo waits for other events": (other_wait_of_gloo, "test_threads_of_gloo", {}),
    "a time-out is worded otherwise": (
        lambda: with_texts(lambda text: text.replace("Timed out waiting", "No answer after")),
        "test_text_of_a_timeout",
        {},
    ),
    "a lost peer is worded otherwise": (
        lambda: with_texts(lambda text: "The remote end went away"),
        "test_text_of_a_lost_peer",
        {},
    ),
    "a private method is renamed": (other_method_for_votes, "test_votes_of_pipelines", {}),
    "a function on the stack is renamed": (other_function_of_join, "test_functions_of_join", {}),
    "an argument that says a part is renamed": (other_argument_of_gathers, "test_arguments_that_say_parts", {}),
    "the types of operations are numbered otherwise": (other_numbers_of_types, "test_types_of_operations", {}),
    "reductions are numbered otherwise": (other_numbers_of_reductions, "test_numbers_of_reduce_operations", {}),
    "an argument of the creation of groups is renamed": (other_argument_of_creation, "test_arguments_of_creation", {}),
    "another function makes groups": (other_function_for_creation, "test_creation_goes_through_one_function", {}),
    "errors are logged under another key": (other_key_of_errors, "test_errors_are_logged", {}),
    "zero_grad fills with zeros": (gradients_become_zeros, "test_zero_grad", {}),
    "assert_close calls another function": (
        other_function_for_differences,
        "test_differences_go_through_one_function",
        {},
    ),
    "schedulers leave another mark": (other_mark_of_schedulers, "test_optimizers", {}),
    "a function of torch._C has moved": (
        moved_function,
        "test_private_names",
        {"name": "torch._C._dispatch_keyset_full_after"},
    ),
    "a backward runs in another function": (other_function_of_backwards, "test_frames_of_ddp", {}),
    "DDP compares parameters in another file": (other_files_of_ddp, "test_frames_of_ddp", {}),
    "DDP lists its hooks elsewhere": (other_hooks_of_ddp, "test_tensors_of_ddp", {}),
    "a module calls its forward in another function": (
        lambda: recoded(torch.nn.Module._call_impl, co_name="_call"),
        "test_frame_of_a_module",
        {},
    ),
    "checkpoints move to another folder": (
        lambda: moved_folder("torch.distributed.checkpoint"),
        "test_frames_of_checkpoints",
        {},
    ),
    "pipelines learn shapes in another function": (
        other_function_that_learns_shapes,
        "test_functions_that_learn_shapes",
        {},
    ),
    "a port in use is worded otherwise": (other_text_of_a_port, "test_text_of_a_port_in_use", {}),
    "DTensor words its refusal otherwise": (other_text_of_dtensor, "test_texts_of_dtensor", {}),
    "the dispatcher's send takes the tag before the rank": (
        ranks_change_places,
        "test_arguments_of_operations",
        {"name": "send"},
    ),
    "the recorder joins backend and name otherwise": (
        lambda: with_dump(lambda entry: entry.update(profiling_name=entry["profiling_name"].replace(":", "::"))),
        "test_values_of_the_recorder",
        {},
    ),
    "torchrun gives its main thread another name": (
        lambda: recoded(importlib.import_module("torch.distributed.run").run, co_consts=("agent",)),
        "test_name_of_torchrun",
        {},
    ),
    "groups have names instead of numbers": (other_names_of_groups, "test_creation_goes_through_one_function", {}),
    "send takes the tag before the rank": (other_order_of_messages, "test_arguments_of_messages", {"name": "send"}),
}

# In an interpreter that is to have a mutation: `python -c "import mutations"` with this variable.
if os.environ.get("MUTATION"):
    MUTATIONS[os.environ["MUTATION"]][0]()
