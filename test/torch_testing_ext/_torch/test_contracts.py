"""Assumptions about torch, one test each: what a new release breaks is red here, and says what depends on it."""

import ast
import functools
import gc
import importlib
import inspect
import logging
import os
import pickle
import platform
import re
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract import BrokenContract, contract
from kit.own_process import error_of, in_own_process
from kit.plain_groups import fake_world, two_groups, world_of_one
from mutations import MUTATIONS

import torch_testing_ext
from torch_testing_ext._torch import compared_training, compiler_state, replacing, torch_frames, training
from torch_testing_ext._torch.groups import gloo_messages, made_groups, roots_of_calls
from torch_testing_ext._torch.groups.process_groups import made_groups_before
from torch_testing_ext._torch.operations import operation_hook, tensor_uses, watched_waits, works
from torch_testing_ext._torch.signs import error_texts, native_threads
from torch_testing_ext._torch.signs.recorded_entries import RecordedEntry

C10D: Any = dist.distributed_c10d
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
SANITIZER = "--sanitize: mismatches would be told wrongly, or not at all"
EVERY_TEST = "the comparison of the ranks' collectives in every test"


def since(*version: int) -> Any:
    """Mark: the assumption is about this release of torch and later ones."""
    return pytest.mark.skipif(version > VERSION, reason=f"torch {'.'.join(map(str, version))} has it first")


# -- operations of c10d

# The beginning of the type, and the name, of each argument whose place we know.
ARGUMENTS = {
    "group": (r".*\.c10d\.ProcessGroup", r"process_group"),
    "inputs": (r"(List\[)*Tensor\]*", r"input.*|tensors?"),
    "outputs": (r"(List\[)*Tensor\]*", r"output.*|tensors?"),
    "op": (r".*\.c10d\.ReduceOp", r"reduce_op"),
    "root": (r"int", r"root_rank"),
    "peer": (r"int", r"dst|src"),
    "tag": (r"int", r"tag"),
    "splits": (r"List\[int\]", r"output_split_sizes"),
    "timeout": (r"int", r"timeout"),
}


@functools.cache
def schemas() -> dict[str, Any]:
    found = torch._C._jit_get_all_schemas()
    return {schema.name.partition("::")[2]: schema for schema in found if schema.name.startswith("c10d::")}


@pytest.mark.parametrize("name", operation_hook.KNOWN)
@contract(SANITIZER)
def test_arguments_of_operations(name):
    """The arguments of c10d's operations stand where `operation_hook.KNOWN` says."""
    if name == "gather_into_tensor_" and name not in schemas():
        pytest.skip("this release of torch has no such operation")
    arguments = schemas()[name].arguments
    for role, place in operation_hook.KNOWN[name].items():
        if role == "kind":
            continue
        kind, names = ARGUMENTS[role]
        told = f"argument {place} of c10d::{name}, {role}, is {arguments[place].name}: {arguments[place].type}"
        assert re.fullmatch(kind, str(arguments[place].type)), told
        assert re.fullmatch(names, arguments[place].name), told


@pytest.mark.parametrize("name", [name for name, spec in operation_hook.KNOWN.items() if "timeout" in spec])
@contract("the sanitizer, which tells waits of callers from waits of torch")
def test_async_op_before_timeout(name):
    """The argument before the time-out says whether the caller waits itself."""
    if name not in schemas() or name == "monitored_barrier_":
        return
    assert schemas()[name].arguments[operation_hook.KNOWN[name]["timeout"] - 1].name == "async_op"


@pytest.mark.parametrize("name", [name for name, spec in operation_hook.KNOWN.items() if "splits" in spec])
@contract(SANITIZER)
def test_splits_of_inputs_follow(name):
    """The splits of the input follow those of the output."""
    assert schemas()[name].arguments[operation_hook.KNOWN[name]["splits"] + 1].name == "input_split_sizes"


@contract(SANITIZER)
def test_no_other_operations():
    """All operations of c10d with a group are known."""
    with_group = {
        name
        for name, schema in schemas().items()
        if any("c10d.ProcessGroup" in str(argument.type) for argument in schema.arguments)
    }
    assert with_group <= {*operation_hook.KNOWN}, f"new: {', '.join(with_group - {*operation_hook.KNOWN})}"


@contract("--sanitize and whole worlds, which hook every operation")
def test_operations_can_be_hooked():
    """The operations of c10d can be hooked."""
    assert operation_hook.can_hook() is None, operation_hook.can_hook()


class Heard:
    """Hears of operations."""

    def __init__(self):
        self.before_them, self.after_them, self.of_ddp = [], [], []

    def before(self, spec, args):
        issuer = torch_frames.issuer_of(sys._getframe(1))
        op = operation_hook.hook.reduce_op_of(spec, args)
        name = issuer.f_code.co_name
        self.before_them.append((spec.kind, op, operation_hook.group_of(spec, args), name))
        self.of_ddp.append((torch_frames.is_awaited_in_cpp(issuer), torch_frames.is_of_reducer(issuer)))
        self.is_by_distributed = torch_frames.is_called_by_distributed(issuer)
        self.is_called_as = torch_frames.is_called_as(name, issuer)

    def after(self, spec, known, args, result):
        self.after_them.append(works.work_of(result))

    def raised(self, known):
        pass


def hooked():
    world_of_one()
    heard = Heard()
    operation_hook.hook.tell(heard)
    return heard


@contract("--sanitize and whole worlds")
@in_own_process
def test_hook_gets_group_and_work():
    """A hook on an operation gets the group and the work as Python knows them."""
    heard = hooked()
    group = dist.new_group([0])
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    assert heard.before_them[-1][0] == "all_reduce"
    assert heard.before_them[-1][2] is group
    assert heard.after_them[-1] is work


@contract("the sanitizer's places and its rules for waits")
@in_own_process
def test_issuer_of_an_operation():
    """The frame above a kernel is that of the function of torch.distributed, in its own file."""
    heard = hooked()
    dist.broadcast(torch.ones(2), 0)
    assert heard.before_them[-1][3] == "broadcast"
    assert heard.is_by_distributed and heard.is_called_as


@contract(SANITIZER)
@in_own_process
def test_numbers_of_reduce_operations():
    """The reduce operations have the numbers of `operation_hook.REDUCE_OPS`."""
    heard = hooked()
    # gloo has no other.
    for name in ("sum", "product", "min", "max", "band", "bor", "bxor"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), getattr(dist.ReduceOp, name.upper()))
        assert operation_hook.name_of_reduce_op(heard.before_them[-1][1]) == name
    for name in ("AVG", "PREMUL_SUM"):
        assert operation_hook.name_of_reduce_op(int(getattr(dist.ReduceOp, name))) == name.lower()


@contract("DDP in whole worlds")
def test_complete_work():
    """A work can be made of a future, and boxed as operations return it."""
    future: Any = torch.futures.Future()
    future.set_result([torch.ones(1)])
    boxed = torch._C._distributed_c10d._create_work_from_future(future).boxed()
    assert isinstance(boxed, torch.ScriptObject)
    assert works.work_of(boxed).is_completed()


@contract("worlds of fake groups, whose all_to_all would be refused")
@in_own_process
def test_name_of_the_fake_backend():
    """A fake group says that it is fake, and is fake for every device."""
    fake_world()
    group: Any = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).name() == "fake"
    assert operation_hook.is_without_data(group), group.name()


@contract("what a rank holds in a whole world")
def test_schema_says_what_is_written():
    """An operation's schema says which arguments it writes, and which results are views."""
    arguments = torch.ops.aten.add_.Tensor._schema.arguments
    assert arguments[0].alias_info.is_write and arguments[1].alias_info is None
    assert tensor_uses.is_view(torch.ops.aten.view.default)
    assert not tensor_uses.is_view(torch.ops.aten.add_.Tensor)
    assert tensor_uses.name_of(torch.ops.aten.equal.default) == "aten::equal"
    assert torch.ops._c10d_functional.wait_tensor.default._schema.name.endswith("wait_tensor")


# -- frames


def code_of(function: Any) -> Any:
    return inspect.unwrap(function).__code__


@contract("the sanitizer: a received vote would count as a mismatch")
@pytest.mark.skipif(not (2, 13) <= VERSION < (2, 15), reason="other releases do not vote in fake groups")
@in_own_process
def test_votes_of_pipelines():
    """The functions in which a stage of a pipeline votes are methods of `PipelineStage`."""
    from torch.distributed.pipelining.stage import PipelineStage

    for name in torch_frames.VOTES:
        assert callable(getattr(PipelineStage, name, None)), f"there is no PipelineStage.{name}"


@contract("the sanitizer: Join would count as work that nobody waits for")
def test_functions_of_join():
    """The functions that tell ranks without inputs that one goes on are in the files that we know."""
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    for owner, name in (
        (Join, "notify_join_context"),
        (DistributedDataParallel, "_check_global_requires_backward_grad_sync"),
    ):
        code = code_of(getattr(owner, name))
        assert code.co_name in torch_frames.FOR_JOIN
        assert code.co_filename.endswith(torch_frames.FOR_JOIN[code.co_name]), code.co_filename


@contract("--sanitize and whole worlds: what DDP waits for in C++ would count as never waited for")
@in_own_process
def test_frames_of_ddp():
    """DDP issues operations from files, and in the function of autograd, by whose names we know them."""
    from torch.nn.parallel import DistributedDataParallel

    heard = hooked()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    made = len(heard.of_ddp)
    assert made and {*heard.of_ddp} == {(True, False)}, heard.of_ddp
    model(torch.ones(1)).sum().backward()
    assert (False, True) in heard.of_ddp[made:], heard.of_ddp[made:]


@contract("which modules the traffic of a program belongs to")
def test_frame_of_a_module():
    """The function that calls a module's forward has the module in a local variable, in a file that we know."""
    found = []

    class Noting(torch.nn.Module):
        def forward(self, given):
            found.extend(torch_frames.modules_of(sys._getframe()))
            return given

    module = Noting()
    module(torch.ones(1))
    assert found == [module], found


@contract("whole worlds, whose checkpoints collect objects that differ from rank to rank")
@in_own_process
def test_frames_of_checkpoints():
    """What saves a distributed checkpoint is in a folder of its own."""
    from torch.distributed import checkpoint

    found = []

    class Part:
        def state_dict(self):
            found.append(torch_frames.is_in_checkpoint(sys._getframe()))
            return {}

        def load_state_dict(self, state):
            pass

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({"part": Part()}, checkpoint_id=folder, no_dist=True)
    assert found == [True], found


@contract("layouts: the microbatch by which a pipeline learns shapes would count as a step")
def test_functions_that_learn_shapes():
    """A stage of a pipeline learns shapes in a function that we know."""
    from torch.distributed.pipelining.stage import PipelineStage

    found = [getattr(PipelineStage, name, None) for name in compared_training.LEARNS_SHAPES]
    assert any(found), f"PipelineStage has none of {', '.join(compared_training.LEARNS_SHAPES)}"
    assert all(code_of(each).co_name in compared_training.LEARNS_SHAPES for each in found if each)


@contract("the sanitizer: it would not say which placements differ")
def test_arguments_that_say_parts():
    """The functions of DTensor and of functional collectives have the arguments that say which part a rank has."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import _redistribute

    found = 0
    for module in (_redistribute, functional):
        for name, wanted in torch_frames.ARGUMENTS.items():
            function = getattr(module, name, None)
            if function is not None:
                found += 1
                code = code_of(function)
                assert code.co_name == name and code.co_filename.endswith(torch_frames.FILES), code.co_filename
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                assert {*wanted} <= {*names}, f"{name} has {', '.join(names)}"
    assert found >= 2
    assert hasattr(_redistribute, "redistribute_local_tensor") and hasattr(functional, "all_gather_tensor")


@contract("places in every message")
def test_files_around_calls():
    """torch.distributed's functions are in its file, and their decorator in c10d_logger.py."""
    assert dist.all_reduce.__code__.co_filename.endswith(torch_frames.AROUND_CALLS)
    assert code_of(dist.all_reduce).co_filename.endswith(torch_frames.AROUND_CALLS[0])


@contract("places in every message")
def test_files_of_deprecated_functions():
    """The decorator of deprecated functions counts as torch's."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert torch_frames.is_of_torch(getattr(dist, name).__code__.co_filename)


@contract("the sanitizer's places in programs that torch compiles")
def test_files_around_modes():
    """torch keeps its compiler out of modes by functions in the files that we know."""
    function: Any = torch._disable_dynamo(lambda: 0, recursive=True)
    assert function.__code__.co_filename.endswith(torch_frames.AROUND_MODES)


@contract("blocks of traffic: torch would compile what counts in them")
def test_callback_of_the_compiler():
    """The compiler's callback is None in a thread that compiles nothing, and only there."""
    compiler: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    outside = compiler.set_eval_frame(False)
    within = compiler.get_eval_frame_callback()
    compiler.set_eval_frame(outside)
    assert (outside, within, compiler.get_eval_frame_callback()) == (None, False, None)


# -- records of collectives

ENTRY = {
    *("collective_seq_id", "frames", "input_dtypes", "input_sizes", "is_p2p", "op_id", "output_dtypes", "output_sizes"),
    *("p2p_seq_id", "pg_id", "process_group", "profiling_name", "record_id", "retired", "state", "thread_id"),
    *("thread_name", "time_created_ns", "time_discovered_completed_ns", "time_discovered_started_ns", "timeout_ms"),
}


def recorded() -> dict[str, Any]:
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, True, False))


@contract(EVERY_TEST)
@in_own_process
def test_keys_of_the_recorder():
    """The recorder's entries have the keys that we know."""
    world_of_one()
    dist.all_reduce(torch.ones(3, 2))
    (entry,) = recorded()["entries"]
    assert {*entry} == ENTRY, f"new: {sorted({*entry} - ENTRY)}, gone: {sorted(ENTRY - {*entry})}"


@contract(EVERY_TEST)
@in_own_process
def test_values_of_the_recorder():
    """The recorder's entries say group, kind, sizes, types, time and place as we read them."""
    world_of_one()
    dist.all_reduce(torch.ones(3, 2))
    (entry,) = recorded()["entries"]
    # gloo's thread retires a call after its work is complete.
    for _ in range(500):
        if entry["retired"]:
            break
        time.sleep(0.01)
        (entry,) = recorded()["entries"]
    assert entry["process_group"] == ("0", "default_pg"), entry["process_group"]
    assert entry["profiling_name"] == "gloo:all_reduce", entry["profiling_name"]
    assert [list(size) for size in entry["input_sizes"]] == [[3, 2]] == [list(size) for size in entry["output_sizes"]]
    assert entry["input_dtypes"] == ["Float"], entry["input_dtypes"]
    assert (entry["state"], entry["retired"]) == ("scheduled", True), "gloo retires a call at its end"
    assert (entry["record_id"], entry["collective_seq_id"], entry["is_p2p"]) == (0, 1, False)
    assert entry["timeout_ms"] == 1_800_000, entry["timeout_ms"]
    assert entry["frames"][0].keys() == {"name", "filename", "line"}
    assert any(frame["filename"] == __file__ for frame in entry["frames"])


@contract(EVERY_TEST)
@in_own_process
def test_types_in_the_recorder():
    """The recorder has torch's C++ names of types."""
    world_of_one()
    types = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16", "bool")
    for name in types:
        dist.all_reduce(torch.ones(1, dtype=getattr(torch, name)))
    found = [RecordedEntry(entry).inputs for entry in recorded()["entries"]]
    assert found == [(f"[1] {name}",) for name in types], found


@contract("how ranks are started after a group was made in their parent")
@in_own_process
def test_recorder_knows_groups():
    """The recorder says whether a process has made a group."""
    world_of_one()
    assert made_groups_before()


@contract("whether a deadlock is proven: messages would be missed")
@in_own_process
def test_messages_use_up_numbers():
    """Sends and receives use up sequence numbers, and gloo's recorder leaves them out."""
    groups = two_groups()
    message = [torch.ones(1)]
    before = groups[0]._get_sequence_number_for_group()
    sent, received = groups[0].send(message, 1, 5), groups[1].recv(message, 0, 5)
    sent.wait(), received.wait()
    assert groups[0]._get_sequence_number_for_group() == before + 1
    assert recorded().get("entries", []) == []


@contract("whether a deadlock is proven: a message would count as a collective")
@in_own_process
def test_types_of_operations():
    """Works of sends and receives have the types 12, 13 and 14; those of collectives have others."""
    groups = two_groups()
    message = [torch.ones(1)]
    found = []
    for receive in (lambda: groups[1].recv(message, 0, 5), lambda: groups[1].recv_anysource(message, 5)):
        works_of_both = groups[0].send(message, 1, 5), receive()
        for work in works_of_both:
            work.wait()
        found += [int(work._get_op_type()) for work in works_of_both]
    assert found == [12, 13, 12, 14], found
    reductions = [group.allreduce(message) for group in groups]
    for work in reductions:
        work.wait()
    assert type(reductions[0]) is dist.Work
    assert made_groups.is_of_collective(reductions[0])


@contract("the messages between ranks in every test")
@pytest.mark.parametrize("name", gloo_messages.METHODS_OF_MESSAGES)
def test_arguments_of_messages(name):
    """The methods by which a group sends and receives have the arguments that we know."""
    text = getattr(dist.ProcessGroup, name).__doc__
    _, parameters = gloo_messages.METHODS_OF_MESSAGES[name]
    found = tuple(re.findall(r"(\w+): ", text.partition(")")[0]))[1:]
    # C++ has no names for those of recv_anysource.
    assert found in (parameters, tuple(f"arg{number}" for number in range(len(parameters)))), found


@contract("the messages between ranks in every test")
@in_own_process
def test_messages_go_through_methods():
    """`dist.send` and `dist.recv` call the methods of the group's class."""
    fake_world()
    called = []

    def note(name, method):
        def call(group, *args, **kwargs):
            called.append((name, len(args), *sorted(kwargs)))
            return method(group, *args, **kwargs)

        return call

    replacing.replace_for_good("messages", note)
    dist.send(torch.ones(1), 1, tag=7)
    dist.recv(torch.ones(1), 1, tag=7)
    # The work of a fake group does not know its source.
    error_of(lambda: dist.recv(torch.ones(1), tag=7))
    assert called == [("send", 3), ("recv", 3), ("recv_anysource", 2)], called


@contract("the roots of collectives in every test")
@pytest.mark.parametrize("name", roots_of_calls.METHODS_WITH_ROOTS)
def test_arguments_of_calls_with_roots(name):
    """The root, or the options that have it, are where we look for them."""
    text = getattr(dist.ProcessGroup, name).__doc__
    forms = [re.findall(r"(\w+): ", form.partition(")")[0]) for form in text.split(f"{name}(self: ")[1:]]
    place = roots_of_calls.METHODS_WITH_ROOTS[name]
    assert {form[place] for form in forms} == {"opts", "root"}, forms
    assert hasattr(getattr(dist, f"{name.title()}Options")(), "rootRank")


@contract("messages under torch.compile")
def test_compiler_can_be_told_to_skip():
    """The compiler can be told to leave a function alone."""
    call = gloo_messages.not_compiled(lambda: 0)
    assert call._torchdynamo_disable


# -- groups


@contract("the groups of every test, whole worlds, and what waits for peers that make a group")
def test_arguments_of_creation():
    """The function that makes groups has the arguments that we read and change."""
    wanted = {"group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"}
    wanted |= {"backend_options", "timeout", "group_desc"}
    found = {*inspect.signature(C10D._new_process_group_helper).parameters}
    assert wanted <= found, f"gone: {', '.join(sorted(wanted - found))}"


@contract("the groups of every test, whole worlds, and what waits for peers that make a group")
@in_own_process
def test_creation_goes_through_one_function():
    """All groups are made by one function, which torch looks up in its module, and which returns the group first."""
    from torch_testing_ext._torch.groups import group_creators

    made = []

    def take_part(arguments, create):
        made.append((arguments["group_name"], arguments["group_rank"], arguments["global_ranks_in_group"], create()))
        return made[-1][-1]

    group_creators.take_part(take_part)
    world_of_one()
    group = dist.new_group([0])
    assert (made[0][0], made[0][1], [*made[0][2]]) == ("0", 0, [])
    assert list(made[1][2]) == [0]
    assert group_creators.group_of_member(made[1][-1]) is group
    # Only groups that all ranks make have numbers as names.
    dist.new_group([0], use_local_synchronization=True)
    assert [each[0].isdecimal() for each in made] == [True, True, False], [each[0] for each in made]


@contract("what waits for peers that make a group: a rank that is no member would count as one")
@in_own_process
def test_creation_without_this_rank():
    """A rank that is no member of a group has no number there."""
    from torch_testing_ext._torch.groups import group_creators

    made = []

    def take_part(arguments, create):
        made.append((arguments["group_rank"], create()))
        return made[-1][-1]

    group_creators.take_part(take_part)
    fake_world()
    dist.new_group([1, 2])
    assert made[-1][0] is None and group_creators.group_of_member(made[-1][1]) is None, made[-1]


@contract("the groups of every test")
@in_own_process
def test_registry_of_groups():
    """The registry has the backend of each group, and the default store."""
    world_of_one()
    group: Any = dist.group.WORLD
    assert str(C10D._world.pg_map[group][0]) == "gloo", C10D._world.pg_map[group]
    assert C10D._get_default_store() is not None
    assert torch.device("cpu") in group._device_types, group._device_types
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    assert made_groups.timeout_of_group(group) == 1800


@contract("tests of PyTorch's that use groups of one name in several worlds")
@in_own_process
def test_origin_of_stores():
    """A store says where the ranks of a world meet."""
    stores: Any = dist
    under = stores.PrefixStore("a", stores.PrefixStore("b", stores.FileStore("/tmp/../tmp/contracts", 1)))
    assert under._underlying_non_prefix_store.path == "/tmp/../tmp/contracts"
    server = stores.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert server.port > 0 and server.timeout > timedelta(0)


@contract("a rank that is being debugged: its peers would give up")
@in_own_process
def test_default_timeout_is_asked_for():
    """torch asks its module for the time-out of a group."""
    from torch_testing_ext._torch.groups import process_groups

    process_groups.wait_without_end()
    world_of_one()
    assert made_groups.timeout_of_group(dist.group.WORLD) == 86_400


@contract("errors of collectives, which tell a failed call from one that hangs")
@in_own_process
def test_errors_are_logged():
    """torch logs each error of a collective as a dictionary with `error`."""
    from torch_testing_ext._torch.groups import collective_errors

    seen: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record):
            seen.append(record)

    collective_errors.logger_of_errors().addHandler(Handler())
    world_of_one()
    error_of(lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16)))
    assert any(isinstance(record.msg, dict) and "error" in record.msg for record in seen)


@contract("ranks that are threads")
@in_own_process
def test_worlds_of_threads():
    """Groups have a registry that can be replaced, and a table of backends."""
    from torch_testing_ext._torch.groups import thread_worlds

    thread_worlds.isolate_threads(True)
    thread_worlds.isolate_threads(False)
    assert isinstance(thread_worlds.get_world(), thread_worlds.world_class())
    dist.Backend.register_backend("ours", lambda *_: None, devices=["cpu"])
    assert thread_worlds.backend_plugin("ours") is not None
    thread_worlds.set_world(thread_worlds.world_class()())
    assert not dist.is_initialized()


@contract("the sharding of threads, whose fake tensors would race")
@since(2, 12)
def test_lock_of_sharding():
    """The sharding propagator has a lock of its class."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    assert hasattr(ShardingPropagator, "_fake_mode_lock")


# -- threads of C++

ON_LINUX = pytest.mark.skipif(platform.system() != "Linux", reason="Linux shows the threads of a process")
BLOCKED = "whether a deadlock is proven: ranks would seem to run, and tests would end at their time-out"


def threads_of_process() -> list[tuple[str, str]]:
    """The name and the system call of each thread."""
    folders = [Path("/proc/self/task", number) for number in os.listdir("/proc/self/task")]
    return [((folder / "comm").read_text().strip(), (folder / "syscall").read_text().strip()) for folder in folders]


@ON_LINUX
@contract(BLOCKED)
@in_own_process
def test_threads_of_gloo():
    """All threads that a group of gloo starts are known as such that serve."""
    before = len(threads_of_process())
    world_of_one()
    dist.barrier()
    # A thread names itself when it runs for the first time, and the loop of connections may be at work.
    for _ in range(500):
        threads = threads_of_process()
        serving = [name for name, call in threads if native_threads.serves(name, call, platform.machine())]
        loops = [call for _, call in threads if native_threads.is_loop_of_connections(call, platform.machine())]
        if "pt_gloo_runloop" in serving and loops and len(threads) - before <= len(serving):
            return
        time.sleep(0.01)
    raise AssertionError(f"the threads are {threads}")


@ON_LINUX
@contract(BLOCKED)
@in_own_process
def test_thread_of_a_store():
    """The thread of a store's server has a name that is known."""
    before = {name for name, _ in threads_of_process()}
    stores: Any = dist
    server = stores.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    new = {name for name, _ in threads_of_process()} - before
    assert new and new <= {*native_threads.SERVING_THREADS}, (new, server)


@contract("whether a pytest that torchrun has started counts as a rank")
def test_name_of_torchrun():
    """torchrun gives its main thread the name that we know."""
    from torch.distributed import run

    names = {each for each in code_of(run.run).co_consts if isinstance(each, str)}
    assert names & {*native_threads.TORCHRUN}, f"run() names {', '.join(sorted(names))}"


# -- texts of errors

LOST = "whether a rank counts as the first that failed, or as one that lost its peer"


@contract(LOST)
@in_own_process
def test_text_of_a_lost_peer():
    """gloo says that a peer has closed its connection."""
    groups = two_groups()
    groups.pop()
    gc.collect()
    error = error_of(lambda: groups[0].allreduce([torch.ones(1)]).wait())
    assert error_texts.LOST_PEER.search(str(error)), str(error)


@contract(LOST)
@in_own_process
def test_text_of_a_lost_store():
    """A store says that its server has gone."""
    stores: Any = dist
    server = stores.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = stores.TCPStore("localhost", server.port, is_master=False, timeout=timedelta(seconds=1))
    del server
    gc.collect()
    error = error_of(lambda: client.get("key"))
    assert error_texts.LOST_PEER.search(str(error)), str(error)


@contract(LOST)
@in_own_process
def test_text_of_a_timeout():
    """gloo says that it has timed out waiting, and in which line of C++."""
    groups = two_groups(0.05)
    error = error_of(lambda: groups[0].allreduce([torch.ones(1)]).wait())
    assert error_texts.GAVE_UP.search(str(error)), str(error)
    assert "[/" in str(error) and "[/" not in error_texts.without_cpp_place(str(error)), str(error)


@contract(LOST)
@in_own_process
def test_text_of_a_timeout_at_a_store():
    """Stores say that they have timed out waiting."""
    stores: Any = dist
    server = stores.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for store in (server, stores.HashStore()):
        error = error_of(functools.partial(store.wait, ["key"], timedelta(milliseconds=1)))
        assert error_texts.GAVE_UP.search(str(error)), str(error)


@contract("why a rank did not come to a monitored barrier")
@in_own_process
def test_text_of_a_monitored_barrier():
    """The first line of a monitored barrier's error names it."""
    groups = two_groups()
    error = error_of(lambda: groups[0].monitored_barrier(timedelta(milliseconds=20)))
    assert error_texts.lines_that_say_why(str(error)) == str(error), str(error)
    assert error_texts.GAVE_UP.search(str(error)), str(error)


@contract("tests that run again when a port is in use")
@in_own_process
def test_text_of_a_port_in_use():
    """A store says that its port is in use."""
    stores: Any = dist
    server = stores.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    error = error_of(lambda: stores.TCPStore("localhost", server.port, is_master=True, wait_for_workers=False))
    assert error_texts.PORT_IN_USE.search(str(error)), str(error)
    assert error_texts.has_one_of(error, [error_texts.ADDRESS_IN_USE])


@contract("assertEqual of dataclasses with tensors")
def test_text_of_an_ambiguous_tensor():
    """A tensor says that its truth is ambiguous."""
    assert error_texts.is_of_ambiguous_tensor(error_of(lambda: bool(torch.ones(2))))


@contract("checks of sharding rules")
@in_own_process
def test_texts_of_dtensor():
    """DTensor says that it does not mix with tensors, and has no strategy."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    world_of_one()
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.ones(2), mesh)
    mixed = error_of(lambda: tensor + torch.ones(2))
    assert error_texts.is_of_unsupported_dtensor(mixed), str(mixed)

    @torch.library.custom_op("contracts::unknown", mutates_args=())
    def operation(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    operation.register_fake(torch.clone)
    unknown = error_of(lambda: operation(tensor))
    assert error_texts.is_of_unsupported_dtensor(unknown), str(unknown)


# -- works, futures and stores


@contract("which function of torch is replaced: the watch would hear of nothing")
@pytest.mark.parametrize("purpose", replacing.TABLE)
def test_functions_that_are_replaced(purpose):
    """torch has the functions that `replacing.TABLE` lists."""
    row = replacing.TABLE[purpose]
    if tuple(map(int, row.since.split("."))) > VERSION:
        pytest.skip(f"torch {row.since} has them first")
    # Names of a release that not all have, or of a build.
    optional = {"_xpu_init", "_xpu_getDeviceCount", "_cuda_init", "_cuda_getDeviceCount", "reduce_scatter_single"}
    optional |= {"queue_len", "queue_pop", "queue_push"} if VERSION < (2, 13) else set()
    wanted = {name.format(device="cuda") for names in row.functions.values() for name in names}
    found = {name for _, name in replacing.functions_of(purpose, ["cuda"])}
    assert wanted - found <= optional, f"gone: {', '.join(sorted(wanted - found - optional))}"


@contract("the sanitizer, which hears of each wait")
@in_own_process
def test_waits_go_through_methods():
    """Code that waits for a work or its future calls methods of their classes."""
    heard = []

    class Futures:
        def future_taken(self, work, future):
            heard.append("taken")

        def future_used(self, future):
            heard.append("used")

        def future_chained(self, future, result):
            heard.append("chained")

    world_of_one()
    watched_waits.hooks.tell(watched_waits.WaitListener(lambda work: heard.append("wait"), None, Futures()))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    future = work.get_future()
    future.wait()
    torch.futures.collect_all([future]).wait()
    assert heard[:3] == ["wait", "taken", "used"] and heard.count("used") >= 2, heard


# -- tensors


@contract("the sanitizer and whole worlds, which hear of reads")
@pytest.mark.parametrize(
    "read",
    [bool, float, int, repr, "{}".format, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy],
    ids=["bool", "float", "int", "repr", "format", "item", "tolist", "numpy"],
)
def test_reads_go_through_methods(read):
    """Python reads a tensor by methods of its class."""
    from torch_testing_ext._torch.tensors import tensor_reads

    heard = []

    class Reads:
        def on_read(self, method, tensor):
            heard.append(method)

        def on_alias(self, tensor, alias):
            heard.append("data")

    listener = Reads()
    tensor_reads.listen_to_reads(listener)
    try:
        # By the class of now: the row above has taken the function before it was replaced.
        name = getattr(read, "__name__", "")
        getattr(torch.ones(1)[0], name)() if name in ("item", "tolist", "numpy") else read(torch.ones(1)[0])
    finally:
        tensor_reads.stop_listening_to_reads(listener)
    assert heard, "nothing was heard"


@contract("assert_close and assertEqual of tensors")
def test_comparison_of_tensors():
    """`torch.testing` compares by pairs whose methods have the arguments that we know."""
    from torch.testing import _comparison

    from torch_testing_ext._torch.tensors import tensor_comparison

    pair = _comparison.TensorLikePair
    assert {"actual", "expected", "id", "allow_subclasses"} <= {*inspect.signature(pair._process_inputs).parameters}
    assert {"rtol", "atol"} <= {*inspect.signature(pair._compare_regular_values_close).parameters}
    assert callable(pair._check_supported) and int in _comparison.NumberPair._TYPE_TO_DTYPE
    arguments: Any = {"rtol_floor": 0.0, "atol_floor": 0.0}
    tensor_comparison.compare(torch.ones(2), torch.ones(2), **arguments)
    error = error_of(lambda: tensor_comparison.compare(torch.ones(2), torch.zeros(2), **arguments))
    assert "Tensor-likes are not close" in str(error), str(error)


@contract("assertions in whole worlds")
@in_own_process
def test_differences_go_through_one_function():
    """`assert_close` looks its function for differences up in its module."""
    replacing.replace_for_good("differences of tensors", lambda name, find: lambda *args, **kwargs: [])
    torch.testing.assert_close(torch.ones(2), torch.zeros(2))


@contract("TwoTensor and LocalTensor")
def test_subclasses_of_tensors():
    """A subclass without memory of its own can be made, and exported."""
    from torch_testing_ext._torch.tensors import tensor_subclasses

    class Wrapper(torch.Tensor):
        __torch_dispatch__ = None

    made = tensor_subclasses.make_wrapper_subclass(Wrapper, torch.ones(2), (2,), (1,), False)
    assert type(made) is Wrapper and made.shape == (2,)
    assert tensor_subclasses.is_tensor_constructor(torch.ops.aten.ones.default)

    class Made(torch.Tensor):
        @tensor_subclasses.exportable_constructor
        def __init__(self, a):
            self.a = a

    assert Made.__init__ is not torch.Tensor.__init__


@contract("the comparison of replicas: models whose ranks differ on purpose would be told")
@in_own_process
def test_tensors_of_ddp():
    """A DDP model lists its hooks, the buffers that it broadcasts and the parameters that it ignores."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from torch_testing_ext._torch.tensors import replicated_tensors

    world_of_one()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    assert [replica.name for replica in replicated_tensors.tensors_of_ddp(model)] == ["weight", "bias"]
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, 10)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    assert replicated_tensors.tensors_of_ddp(model) == []


# -- what the compiler of data parallel steps knows


@contract("spmd.compile: gradients would be averaged twice or never")
def test_hooks_of_gradients():
    """Hooks on a gradient run in the order of a dictionary, which can be changed."""
    order = []
    parameter = torch.nn.Parameter(torch.ones(1))
    first = parameter.register_post_accumulate_grad_hook(lambda _: order.append("first"))
    parameter.register_post_accumulate_grad_hook(lambda _: order.append("second"))
    assert not training.run_hook_last(parameter, first)
    assert training.run_hook_last(parameter, first)
    parameter.sum().backward()
    assert order == ["second", "first"], order
    assert training.gradient_hooks(parameter) == 2


@contract("spmd.compile: the mean of gradients would never be taken")
def test_end_of_a_backward():
    """A function can be called at the end of a backward, which can be seen from inside."""
    seen = []
    parameter = torch.nn.Parameter(torch.ones(1))

    def hook(_):
        seen.append(training.is_in_backward())
        training.at_end_of_backward(lambda: seen.append("end"))

    parameter.register_post_accumulate_grad_hook(hook)
    parameter.sum().backward()
    assert seen == [True, "end"] and not training.is_in_backward(), seen


@contract("spmd.compile with fully_shard")
def test_memory_of_tensors():
    """The memory of a tensor can be counted, followed and found again."""
    tensor = torch.ones(4)
    reference = training.MemoryReference(tensor)
    assert training.holders_of_memory(tensor) == 1
    view = tensor.view(2, 2)
    assert training.holders_of_memory(tensor) == 2
    assert training.storage_key(tensor) == training.storage_key(view)
    kind = (tensor.shape, tensor.stride(), tensor.dtype)
    again = reference.tensor(*kind)
    assert again is not None and again.data_ptr() == tensor.data_ptr()
    del tensor, view, again
    assert reference.tensor(*kind) is None


@contract("spmd.compile, which refuses optimizers with hooks")
def test_optimizers():
    """An optimizer has its hooks, and a scheduler marks the step that it wraps."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert not training.optimizer_has_hooks(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert training.is_wrapped_by_scheduler(optimizer.__dict__["step"])
    optimizer.register_step_post_hook(lambda *_: None)
    assert training.optimizer_has_hooks(optimizer)


@contract("spmd.compile: gradients that a step leaves would be averaged once more")
def test_zero_grad():
    """`zero_grad` takes gradients away, unless it is told otherwise."""
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        assert inspect.signature(owner.zero_grad).parameters["set_to_none"].default is True


@contract("spmd.compile: a sharded parameter would be no nn.Parameter between calls")
def test_tensors_that_count_as_parameters():
    """A tensor of another class is an nn.Parameter once it is marked."""
    from torch_testing_ext._torch import module_parts

    class Other(torch.Tensor):
        pass

    tensor = torch.ones(1).as_subclass(Other)
    module_parts.count_as_parameter(tensor, True)
    assert isinstance(tensor, torch.nn.Parameter)
    module_parts.count_as_parameter(tensor, False)
    assert not isinstance(tensor, torch.nn.Parameter)


@contract("the comparison of replicas: each part of an optimizer such as ZeRO would count as a step")
def test_frame_of_a_step():
    """The hooks of an optimizer are called in a frame that has it as `self`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    found = []
    look = functools.partial(torch_frames.is_in_method_of, optimizer)
    optimizer.register_step_pre_hook(lambda *_: found.append(look(sys._getframe(1))))
    optimizer.step()
    assert found == [True] and not look(sys._getframe())


@contract("spmd.compile with recurrent modules")
def test_parameters_of_modules():
    """A module has its parameters in a dictionary, and a recurrent one has its weights in a list."""
    from torch_testing_ext._torch import module_parts

    module = torch.nn.LSTM(2, 2)
    new = torch.nn.Parameter(torch.zeros(8, 2))
    assert "weight_ih_l0" in module_parts.own_parameters(module)
    module_parts.put_parameter(module, "weight_ih_l0", new)
    assert module.weight_ih_l0 is new and module._flat_weights[0] is new


@contract("the checks of writes to buffers that a collective uses")
def test_versions_of_tensors():
    """A tensor counts the writes to its memory."""
    tensor = torch.ones(2)
    before = training.version_of(tensor)
    tensor.view(2).add_(1)
    assert training.version_of(tensor) == before + 1


# -- private names, and options of functions


def private_paths() -> list[str]:
    """The dotted private names of modules of torch that `_torch/` uses without asking first whether there are."""
    folder = Path(torch_testing_ext.__file__).parent / "_torch"
    found = set()
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                found.add(ast.unparse(node))
    return sorted(name for name in found if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", name))


def module_of(dotted: str) -> tuple[Any, list[str]]:
    """The innermost module of a dotted name, and what follows it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:length])), parts[length:]
        except ModuleNotFoundError:
            continue
    raise AssertionError(dotted)


# Those of some builds or releases alone: the functions that use them ask first, or only run there.
OF_SOME = (
    *("torch._C._cuda_getDeviceCount", "torch.xpu._is_compiled", "torch._C._storage_Use_Count"),
    "torch._utils_internal.IS_FBSOURCE",
)


@contract("the function in `_torch/` whose docstring names it")
@pytest.mark.parametrize("name", private_paths())
@in_own_process
def test_private_names(name):
    """torch has each private name that `_torch/` uses."""
    found, names = module_of(name)
    for part in names:
        if name not in OF_SOME:
            assert hasattr(found, part), f"there is no {name}"
            found = getattr(found, part)


@contract("questions about FSDP, DTensor and the compiler in tests of these")
@in_own_process
def test_parts_of_fsdp():
    """FSDP has the states, strategies and functions that its tests ask for."""
    from torch_testing_ext._torch import fsdp_parts

    assert len(fsdp_parts.hybrid_strategies()) == 2
    module = fsdp_parts.param_group_module()
    assert module.FSDPParamGroup and module.RegisterPostBackwardFunction
    for name in (fsdp_parts.all_gather_name(), fsdp_parts.reduce_scatter_name()):
        assert callable(getattr(dist, name))
    assert fsdp_parts.new_extension_registry() is not None and fsdp_parts.stream_extension_class()


@contract("DTensor's tests, and ranks that use a second mesh")
@in_own_process
def test_parts_of_dtensor():
    """DTensor has the caches, specs and tables that we clear and change."""
    from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

    from torch_testing_ext._torch.tensors import dtensor_parts

    world_of_one()
    tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    dtensor_parts.forget_meshes()
    dtensor_parts.forget_dtensor_rng()
    spec = dtensor_parts.spec_of(tensor)
    assert spec.placements == tensor.placements
    dtensor_parts.take_placements_literally(spec)
    assert training.local_tensor(tensor).shape == (2,)
    assert training.dtensor_like(tensor, torch.zeros(2)).placements == tensor.placements
    propagator = vars(DTensor._op_dispatcher.sharding_propagator)
    assert {"op_strategy_funcs", "op_to_schema_info"} <= {*propagator}
    assert dtensor_parts.strided_shard(0, 2) and dtensor_parts.shard_order({0: [0]})


@contract("tests with local tensors")
@in_own_process
def test_parts_of_local_tensors():
    """A local tensor has the values of all ranks."""
    from torch_testing_ext._torch.tensors import dtensor_parts

    dtensor_parts.local_tensor_mode(2)
    assert dtensor_parts.local_ints(dtensor_parts.local_ranks(2)) == {0: 0, 1: 1}
    assert dtensor_parts.without_local_tensors() is not None


@contract("the state that a test leaves to the next one")
def test_modules_of_the_compiler():
    """The compiler's modules have the names by which we know whether they are imported."""
    for name in (compiler_state.DYNAMO, compiler_state.INDUCTOR, compiler_state.COMPILE_POOL):
        assert importlib.util.find_spec(name) is not None, name


@contract("fake accelerators, and tests that name devices by the number of their rank")
def test_devices_as_arguments():
    """The functions that select a device have it as their first argument."""
    for function in (torch.cuda.set_device, torch.accelerator.set_device_index):
        assert next(iter(inspect.signature(function).parameters)) in ("device", "device_index")
    assert [*inspect.signature(torch.cuda.device.__init__).parameters][1] == "device"


@contract("the line that first used an accelerator")
def test_devices_are_started_by_entrances():
    """CUDA is started by functions that torch looks up in `torch._C`."""
    names = code_of(torch.cuda._lazy_init).co_names
    assert "_cuda_init" in names, names


@contract("the default group, objects and stores in whole worlds")
def test_arguments_in_worlds():
    """The functions that a whole world replaces have the arguments that we read."""
    assert "world_size" in inspect.signature(dist.init_process_group).parameters
    for function in (dist.broadcast_object_list, dist.scatter_object_list):
        assert {"src", "group_src", "group"} <= {*inspect.signature(function).parameters}
    for name in ("get", "wait", "multi_get"):
        method = getattr(dist.Store, name)
        assert re.search(r"\(self[^,]*, (arg0|keys?): ", method.__doc__), method.__doc__.splitlines()[:3]


# -- that they notice


@pytest.mark.slow
@pytest.mark.parametrize("change", MUTATIONS)
@in_own_process
def test_changes_are_noticed(change):
    if change == "a private method is renamed" and not (2, 13) <= VERSION < (2, 15):
        return
    mutate, name, arguments = MUTATIONS[change]
    mutate()
    schemas.cache_clear()
    with pytest.raises(BrokenContract) as caught:
        globals()[name](**arguments)
    assert "This affects " in str(caught.value)
    # Not by an error of the change itself.
    assert not re.search(r"(Attribute|Type|Name)Error", str(caught.value)), caught.value
