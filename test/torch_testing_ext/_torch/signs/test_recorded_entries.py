"""What the keys of a recorder's entry say of a call."""

import math
import pickle

import pytest
import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.signs.recorded_entries import RecordedEntry


def entry(name, **fields):
    sizes = {"input_sizes": [[2, 3]], "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Int"]}
    return RecordedEntry({"profiling_name": name, "process_group": ("g", "d"), **sizes, **fields})


@in_own_process
def test_what_torch_records():
    world_of_one()
    dist.all_reduce(torch.ones(3, 2, dtype=torch.float16))
    content = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, True, False))
    found = RecordedEntry(content["entries"][0])
    assert (found.kind, found.backend, found.group) == ("all_reduce", "gloo", "0")
    # It counts the groups of the process, and the one that this was forked from may have had some.
    assert isinstance(found.group_id, int)
    assert (found.number, found.sequence_number, found.is_p2p, found.message) == (0, 1, False, None)
    assert (found.shapes, found.inputs) == (("[3, 2]",), ("[3, 2] float16",))
    assert found.timeout == 1800 and found.created > 1e18 and found.tells_end
    ours = next(found.places(torch.__path__[0]))
    assert (ours[0], ours[2]) == (__file__, "test_what_torch_records")


def test_tensors():
    plain, scatter = entry("gloo:all_reduce"), entry("gloo:scatter")
    assert plain.inputs == ("[2, 3] float32",) and scatter.inputs == ("[4] int32",)
    assert plain.sizes_and_types("input") == ((6,), ("Float",)) and plain.sizes_and_types("output") == ((4,), ("Int",))
    assert entry("gloo:barrier", input_sizes=[], input_dtypes=[]).inputs == ()
    # There may be fewer types than shapes, and types of names that both have.
    assert entry("x:y", input_sizes=[[1], [2]], input_dtypes=["BFloat16"]).inputs == ("[1] bfloat16", "[2]")


@pytest.mark.parametrize(
    ("name", "more", "side"),
    [
        ("gloo:all_reduce", {}, None),
        ("gloo:scatter", {}, "output"),
        ("gloo:gather", {}, "input"),
        ("gloo:all_gather", {}, "input"),
        ("nccl:scatter", {}, None),
        ("gloo:send", {"message": 0}, "input"),
    ],
)
def test_side_on_which_members_agree(name, more, side):
    assert entry(name, **more).compared_side == side


@pytest.mark.parametrize(
    ("name", "state", "retired", "is_over", "tells_end"),
    [
        # gloo leaves a call "scheduled", and retires it at its end.
        ("gloo:all_reduce", "scheduled", True, True, True),
        ("gloo:all_reduce", "scheduled", False, False, True),
        # Others may retire it at once, or give up.
        ("other:all_reduce", "scheduled", True, False, False),
        ("nccl:all_reduce", "started", True, False, True),
        ("nccl:all_reduce", "completed", True, True, True),
    ],
)
def test_ends(name, state, retired, is_over, tells_end):
    found = entry(name, state=state, retired=retired)
    assert (found.is_over, found.tells_end) == (is_over, tells_end)


def test_what_is_missing():
    bare = RecordedEntry({"profiling_name": "gloo:all_reduce"})
    assert (bare.number, bare.created, bare.peer, bare.tag, bare.timeout) == (0, 0, None, 0, math.inf)
    assert (bare.shapes, bare.is_over, bare.tells_end, [*bare.places("/")]) == ((), False, False, [])


def test_messages_and_others():
    sent = entry("gloo:send", message=0, is_issued=True, peer=3, tag=7, is_p2p=True)
    assert (sent.message, sent.messages, sent.peer, sent.tag, sent.is_p2p) == (0, 1, 3, 7, True)
    assert entry("gloo:send", message=0, is_issued=False).messages == entry("gloo:all_reduce").messages == 0
    assert entry("gloo:all_reduce", process_group=("g", "fakeccl")).backend == "fakeccl"
    assert sent.numbered(9).number == 9 and sent.numbered(9).what_members_share == sent.what_members_share


def test_places():
    files = ["/torch/x.py", "<string>", "/lib/contextlib.py", "/lib/typing_extensions.py", "/me/a.py", "/me/b.py"]
    frames = [{"filename": file, "line": at, "name": "f"} for at, file in enumerate(files)]
    found = [*entry("gloo:all_reduce", frames=frames).places("/torch/")]
    assert found == [("/me/a.py", 4, "f"), ("/me/b.py", 5, "f")]
