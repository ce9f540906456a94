"""Frames of torch are told from those of programs, and say what torch is doing."""

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import typing_extensions
from torch.distributed.pipelining import schedules

import torch_testing_ext
from torch_testing_ext._torch import torch_frames

C10D = dist.distributed_c10d.__file__
LOGGER = os.path.join(os.path.dirname(C10D), "c10d_logger.py")
OURS = torch_frames.__file__
TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def stack(*calls):
    """The innermost frame of a stack; `calls` are functions and files, innermost first."""
    frame = None
    for name, file in reversed(calls):
        code = SimpleNamespace(co_name=name, co_filename=file)
        frame = SimpleNamespace(f_code=code, f_back=frame, f_lineno=7, f_locals={})
    return frame


@pytest.mark.parametrize(
    "file", [torch.__file__, C10D, "<frozen runpy>", contextlib.__file__, typing_extensions.__file__]
)
def test_files_of_torch(file):
    assert torch_frames.is_of_torch(file)
    assert not torch_frames.is_of_program(file)


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="its pipelines send nothing before the first step")
def test_a_pipeline_that_opens_its_connections():
    seen = []

    class Stage:
        def _get_init_p2p_neighbors_ops(self):
            seen.append(torch_frames.is_opening_pipeline(sys._getframe()))
            return []

    # The functions do no more than this with stages whose connections are opened, and need no more of a schedule.
    of_schedule = SimpleNamespace(_stage=Stage(), _stages=[Stage()], _stage_forward_initialized=False)
    of_schedule._stages_forward_initialized, of_schedule._has_backward = False, False
    arguments = {
        "_warmup_p2p": ([Stage()], False, False),
        "_initialize_stage": ((), {}),
        "_initialize_stages": ((), {}),
    }
    classes = (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)
    there = [(cls, name) for cls in classes for name in torch_frames._OPENS_CONNECTIONS if hasattr(cls, name)]
    for cls, name in there:
        with contextlib.suppress(AttributeError):
            getattr(cls, name)(of_schedule, *arguments[name])
    assert seen and all(seen)
    assert not torch_frames.is_opening_pipeline(sys._getframe())


@pytest.mark.parametrize("file", [os.__file__, torch_testing_ext.__file__, OURS])
def test_files_of_nobody(file):
    assert not torch_frames.is_of_torch(file) and not torch_frames.is_of_program(file)


@pytest.mark.parametrize("file", [__file__, "train.py", "/srv/torch/train.py", pytest.__file__])
def test_files_of_programs(file):
    assert torch_frames.is_of_program(file)


def test_places_of_the_program():
    def inner():
        return [*torch_frames.program_places(sys._getframe())]

    line = inner.__code__.co_firstlineno + 1
    places = contextlib.ExitStack().enter_context(contextlib.nullcontext(inner()))
    assert places[0] == (__file__, line, "inner")
    assert places[1][2] == "test_places_of_the_program"
    assert [*torch_frames.program_places(None)] == []


def test_issuer():
    """The caller of a kernel; modes and watches of ours, and what torch puts around them, do not issue operations."""
    program = ("step", __file__)
    assert torch_frames.issuer_of(stack(("kernel", OURS), program)).f_code.co_name == "step"
    around = [(name, os.path.join("/x", file)) for name, file in zip("ab", torch_frames.AROUND_MODES, strict=True)]
    through = [("kernel", OURS), ("func", "torch/_ops.py"), ("on_call", OURS), *around, ("_call", OURS), program]
    assert torch_frames.issuer_of(stack(*through)).f_code.co_name == "step"
    noted = [("kernel", OURS), ("call", OURS), program]
    assert torch_frames.issuer_of(stack(*noted)).f_code.co_name == "step"
    # In a thread of C++ alone.
    assert torch_frames.issuer_of(stack(("kernel", OURS))) is None


def test_calls_of_distributed():
    wrapped = [("all_reduce", C10D), ("wrapper", LOGGER), ("barrier", C10D), ("step", __file__), ("send", C10D)]
    issuer = stack(*wrapped)
    assert torch_frames.is_called_by_distributed(issuer)
    assert torch_frames.is_called_as("all_reduce", issuer) and torch_frames.is_called_as("barrier", issuer)
    assert not torch_frames.is_called_as("send", issuer)
    for other in (stack(("all_reduce", __file__)), None):
        assert not torch_frames.is_called_by_distributed(other)
        assert not torch_frames.is_called_as("all_reduce", other)


@pytest.mark.parametrize("name", ["_warmup_forward_vote", "_warmup_backward_result"])
def test_votes(name):
    assert torch_frames.is_vote(stack(("recv", C10D), ("wrapper", LOGGER), (name, "stage.py")))
    assert not torch_frames.is_vote(stack(("recv", C10D), ("step", __file__), (name, "stage.py")))
    assert not torch_frames.is_vote(stack(("recv", C10D)))


def test_waits_in_cpp():
    for file in (("distributed", "utils.py"), ("nn", "parallel", "distributed.py")):
        assert torch_frames.is_awaited_in_cpp(stack(("forward", os.path.join(TORCH, *file))))
    assert not torch_frames.is_awaited_in_cpp(stack(("forward", C10D)))
    assert not torch_frames.is_awaited_in_cpp(None)


def test_reducers():
    assert torch_frames.is_of_reducer(stack(("_engine_run_backward", "graph.py"), ("backward", "x.py")))
    assert not torch_frames.is_of_reducer(stack(("hook", "x.py"), ("_engine_run_backward", "graph.py")))
    assert not torch_frames.is_of_reducer(None)


def test_checkpoints():
    file = os.path.join(TORCH, "distributed", "checkpoint", "utils.py")
    assert torch_frames.is_in_checkpoint(stack(("gather_object", C10D), ("reduce_scatter", file), ("save", __file__)))
    assert not torch_frames.is_in_checkpoint(stack(("gather_object", C10D), ("save", "/distributed/checkpoint/x.py")))
    assert torch_frames.call_of_objects(stack(("gather_object", C10D))) == "gather_object"


def test_methods_of_an_object():
    class Stepping:
        def step(self, other):
            frame = sys._getframe()
            return [torch_frames.is_in_method_of(each, frame) for each in (self, other)]

        def step_of(self, other):
            return other.step(self)

    one, other = Stepping(), Stepping()
    assert one.step(other) == [True, False]
    # Also further out.
    assert one.step_of(other) == [True, True]


def test_join():
    join = os.path.join(TORCH, "distributed", "algorithms", "join.py")
    ddp = os.path.join(TORCH, "nn", "parallel", "distributed.py")
    issued = ("all_reduce", C10D)
    assert torch_frames.is_for_join(stack(issued, ("notify_join_context", join)))
    assert torch_frames.is_for_join(stack(issued, ("_check_global_requires_backward_grad_sync", ddp)))
    # By another function, or another file.
    assert not torch_frames.is_for_join(stack(issued, ("forward", ddp)))
    assert not torch_frames.is_for_join(stack(issued, ("notify_join_context", ddp)))
    assert not torch_frames.is_for_join(stack(issued))


def frame_of(source, file, **given):
    """The frame of a function of a file, as it calls `here`."""
    found = []
    names = {"here": lambda: found.append(sys._getframe(1))}
    exec(compile(source, file, "exec"), names)
    function = next(value for name, value in names.items() if name not in ("here", "__builtins__"))
    function(**given)
    return found[0]


def test_parts():
    specs = {name: SimpleNamespace(placements=(name,)) for name in ("current_spec", "target_spec")}
    source = "def redistribute_local_tensor(local, current_spec, target_spec): here()"
    file = os.path.join(TORCH, "distributed", "tensor", "_redistribute.py")
    frame = frame_of(source, file, local=0, **specs)
    assert torch_frames.parts_of(frame) == ("('current_spec',)", "('target_spec',)")
    gathers = "def all_gather_tensor(tensor, gather_dim): here()"
    functional = os.path.join(TORCH, "distributed", "_functional_collectives.py")
    assert torch_frames.parts_of(frame_of(gathers, functional, tensor=0, gather_dim=1)) == ("gather_dim 1",)
    # In a file of the program, and another function.
    assert torch_frames.parts_of(frame_of(gathers, __file__, tensor=0, gather_dim=1)) == ()
    assert torch_frames.parts_of(frame_of("def f(gather_dim): here()", functional, gather_dim=1)) == ()


def raised_in(*files):
    return [SimpleNamespace(f_code=SimpleNamespace(co_filename=file)) for file in files]


def test_raised_by_distributed():
    assert torch_frames.is_raised_by_distributed(raised_in("train.py", C10D))
    assert torch_frames.is_raised_by_distributed(raised_in("train.py", LOGGER, C10D, OURS))
    assert not torch_frames.is_raised_by_distributed(raised_in("train.py", C10D, "hook.py"))
    assert not torch_frames.is_raised_by_distributed(raised_in(C10D, torch.nn.__file__))
    assert not torch_frames.is_raised_by_distributed(raised_in("train.py"))
    assert not torch_frames.is_raised_by_distributed([])
