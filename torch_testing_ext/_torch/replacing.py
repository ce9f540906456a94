"""The functions of torch that are replaced while something watches them, and who has replaced them."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

from torch_testing_ext._torch.torch_frames import is_of_program, is_of_torch

# Makes the new function from its name and the one that is there.
Make = Callable[[str, Any], Any]
# A listener.
L = TypeVar("L")


@dataclass(frozen=True)
class Purpose:
    """Functions that are replaced together.

    `functions`: their names by owner, with `{device}` for a type of accelerators. `since`: the first release that has
    them; an older one, or one that is built without, goes without. `lasts`: until the process ends.
    """

    why: str
    functions: Mapping[str, tuple[str, ...]]
    since: str = "2.11"
    lasts: bool = False


_C10D = "torch.distributed.distributed_c10d"
_OBJECTS = ("broadcast_object_list", "monitored_barrier", "recv_object_list", "scatter_object_list")
_OF_STORES = (
    *("add", "append", "check", "compare_set", "delete_key", "get", "multi_get", "multi_set", "num_keys"),
    *("queue_len", "queue_pop", "queue_push", "set", "wait"),
)
_OF_BACKENDS = (
    *("_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier"),
    *("recv", "recv_anysource", "reduce", "reduce_scatter", "scatter", "send"),
)
_NCCL = ("all_gather", "all_reduce", "broadcast", "init_rank", "reduce", "reduce_scatter", "unique_id")

# All that this package replaces.
TABLE: Mapping[str, Purpose] = {
    "creation of groups": Purpose(
        # Tests may have imported the public functions by name; torch looks this one up in its module.
        "notes the groups of a process, and makes those of whole worlds without communication",
        {_C10D: ("_new_process_group_helper",)},
        lasts=True,
    ),
    "stores of worlds": Purpose(
        # Tests may have imported the rendezvous itself by name.
        "notes who waits for a server, or for workers",
        {"torch.distributed.rendezvous": ("_create_c10d_store",)},
        lasts=True,
    ),
    "new members of groups": Purpose(
        "notes who belongs to a group", {"torch.distributed.ProcessGroup": ("reconfigure",)}, "2.15", lasts=True
    ),
    "messages": Purpose(
        "notes sends, receives and barriers, which gloo's recorder leaves out",
        {"torch.distributed.ProcessGroup": ("send", "recv", "recv_anysource", "monitored_barrier")},
        lasts=True,
    ),
    "roots of calls": Purpose(
        "notes roots, which torch's recorders leave out",
        {"torch.distributed.ProcessGroup": ("broadcast", "reduce", "gather", "scatter")},
        lasts=True,
    ),
    "time-outs of groups": Purpose(
        "waits for a rank that is being debugged", {_C10D: ("_get_default_timeout",)}, lasts=True
    ),
    "waits for works": Purpose(
        "hears who waits for a collective",
        {"torch.distributed.Work": ("wait", "synchronize", "get_future", "block_current_stream", "is_completed")},
    ),
    "uses of futures": Purpose(
        "hears who waits for the future of a collective",
        {"torch._C.Future": ("add_done_callback", "done", "then", "value", "wait"), "torch._C": ("_collect_all",)},
    ),
    "calls of stores": Purpose("reaches planned faults at a store", {"torch.distributed.Store": _OF_STORES}),
    "calls of backends": Purpose(
        "reaches planned faults at calls without a process group",
        {"torch._C._distributed_c10d.Backend": _OF_BACKENDS},
    ),
    "reads of tensors": Purpose(
        "hears of reads that no dispatch mode sees",
        {
            "torch.Tensor": (
                *("__array__", "__bool__", "__float__", "__format__", "__int__", "__reduce_ex__", "__repr__"),
                *("data", "item", "numpy", "tolist"),
            )
        },
    ),
    "differences of tensors": Purpose(
        "leaves values out that a whole world does not know",
        {"torch.testing._comparison": ("not_close_error_metas",)},
        lasts=True,
    ),
    "first use of CUDA or XPU": Purpose(
        "notes the line after which it is not safe to fork",
        {"torch._C": ("_cuda_init", "_cuda_getDeviceCount", "_xpu_init", "_xpu_getDeviceCount")},
    ),
    "other accelerators": Purpose(
        "watches those of an extension that is imported later", {"torch": ("_register_device_module",)}
    ),
    "first use of other accelerators": Purpose(
        # The second is for people; it may be the first by another name.
        "notes the line after which it is not safe to fork",
        {"torch.{device}": ("_lazy_init", "init")},
    ),
    "numbers of devices": Purpose(
        "lets ranks that share devices name them by their own numbers",
        {
            "torch.{device}": ("set_device",),
            "torch.{device}.device": ("__init__",),
            "torch.accelerator": ("set_device_index",),
            "torch.accelerator.device_index": ("__init__",),
            "torch.Tensor": ("{device}",),
        },
        lasts=True,
    ),
    "questions about a device": Purpose(
        "answers for a device that this process does not initialise",
        {"torch.cuda": ("current_device", "get_device_capability", "get_device_properties")},
    ),
    "other extensions": Purpose(
        "refuses an extension beside the fake accelerator",
        {
            "torch.utils": ("rename_privateuse1_backend",),
            "torch.utils.backend_registration": ("rename_privateuse1_backend",),
        },
        lasts=True,
    ),
    "parameters that FSDP frees": Purpose(
        "acts before FSDP1 frees unsharded parameters", {"torch.distributed.fsdp._runtime_utils": ("_reshard",)}
    ),
    "reductions of FSDP": Purpose(
        "delays a reduction, for a model of PyTorch's tests",
        {"torch.distributed": ("reduce_scatter_single", "reduce_scatter_tensor")},
    ),
    "start of a world": Purpose(
        "has the default group of a whole world be there already",
        dict.fromkeys(("torch.distributed", _C10D), ("init_process_group",)),
        lasts=True,
    ),
    "objects in a world": Purpose(
        "refuses what waits for another rank of a whole world",
        dict.fromkeys(("torch.distributed", _C10D), _OBJECTS),
        lasts=True,
    ),
    "objects of others in a world": Purpose(
        "refuses objects that no rank of a whole world can have", {_C10D: ("_tensor_to_object",)}, lasts=True
    ),
    "sources of messages in a world": Purpose(
        "names a rank where any may have sent a message", {"torch.distributed.Work": ("_source_rank",)}, lasts=True
    ),
    "waits at stores in a world": Purpose(
        "waits for the ranks before this one of a whole world, and no others",
        {"torch.distributed.Store": ("get", "multi_get", "wait")},
        lasts=True,
    ),
    "sockets in a world": Purpose(
        "refuses sockets in a whole world", {"torch.distributed.TCPStore": ("__init__",)}, lasts=True
    ),
    "stores of other nodes": Purpose(
        "lets a rank find no store of another node at its own address",
        {"torch.distributed.TCPStore": ("__init__",)},
        lasts=True,
    ),
    "NCCL in a world": Purpose("refuses NCCL in a whole world", {"torch.cuda.nccl": _NCCL}, lasts=True),
    "waits for devices": Purpose(
        "hears who waits for a device, in a block of traffic and in a whole world",
        {
            **{f"torch.{name}": ("synchronize",) for name in ("cuda", "accelerator", "xpu", "mps")},
            **{f"torch.cuda.{name}": ("synchronize",) for name in ("Stream", "Event")},
        },
    ),
    "sizes of storages": Purpose(
        "counts what FSDP frees, in a block of traffic and in a whole world", {"torch.UntypedStorage": ("resize_",)}
    ),
    "copies in a world": Purpose(
        "hears of values that go to the host in a whole world", {"torch.Tensor": ("cpu",)}, lasts=True
    ),
    "lower precision of a layout": Purpose(
        "computes in float64 where a training that is compared asks for less",
        {"torch.Tensor": ("to", "float", "half", "bfloat16")},
        lasts=True,
    ),
    "dropout of a layout": Purpose(
        "drops the same elements in all layouts of a training",
        {"torch.nn.functional": ("dropout",)},
        lasts=True,
    ),
    "norms of a layout": Purpose(
        "looks at gradients before a training clips them",
        {
            "torch.nn.utils.clip_grad": ("_get_total_norm",),
            "torch.nn.utils": ("get_total_norm",),
        },
        lasts=True,
    ),
}

_MISSING: Any = object()


class _Layer:
    """A function that is replaced. `below`: what the owner had itself, if anything."""

    __slots__ = ("below", "make", "name", "owner", "purpose", "value")

    def __init__(self, purpose: str, owner: Any, name: str, make: Make):
        self.purpose = purpose
        self.owner = owner
        self.name = name
        self.make = make
        self.put()

    def put(self) -> None:
        """Replace what is there now."""
        self.below = vars(self.owner).get(self.name, _MISSING)
        # What `vars` gives would not bind self again.
        self.value = self.make(self.name, getattr(self.owner, self.name))
        setattr(self.owner, self.name, self.value)

    @property
    def is_on_top(self) -> bool:
        return vars(self.owner).get(self.name, _MISSING) is self.value


# By owner, which a layer keeps alive, and name: the replacements from the innermost to the outermost.
_layers: dict[tuple[int, str], list[_Layer]] = {}


class Replacement:
    """Functions that are replaced until `undo` is called."""

    def __init__(self, purpose: str, make: Make, devices: Sequence[str] = ()):
        self._own: list[_Layer] = []
        for owner, name in functions_of(purpose, devices):
            layer = _Layer(purpose, owner, name, make)
            _layers.setdefault((id(owner), name), []).append(layer)
            self._own.append(layer)

    def undo(self) -> None:
        """Put back what was there, the last function first. Replacements since then, which others need, stay."""
        while self._own:
            _remove(self._own.pop())


def _remove(layer: _Layer) -> None:
    key = id(layer.owner), layer.name
    stack = _layers[key]
    at = stack.index(layer)
    if layer.is_on_top:
        _put_back(layer)
    elif stack[-1].is_on_top and all(upper.below is lower.value for lower, upper in itertools.pairwise(stack[at:])):
        _put_back(layer)
        for upper in stack[at + 1 :]:
            upper.put()
    # Else somebody else has replaced it since then, and calls ours, which hears of nothing any more.
    del stack[at]
    if not stack:
        del _layers[key]


def _put_back(layer: _Layer) -> None:
    if layer.below is _MISSING:
        delattr(layer.owner, layer.name)
    else:
        setattr(layer.owner, layer.name, layer.below)


@contextmanager
def replaced(purpose: str, make: Make, devices: Sequence[str] = ()) -> Iterator[None]:
    """Within this context, the functions of a purpose in `TABLE` are those that `make` returns."""
    replacement = Replacement(purpose, make, devices)
    try:
        yield
    finally:
        replacement.undo()


class Hooks(Generic[L]):
    """The listeners of this process to some functions of torch, which are as they were while there is none."""

    def __init__(self, functions: Callable[[L], Mapping[str, Make]]):
        """`functions`: the purposes of the functions that a listener hears of, and what makes those that tell it."""
        self.listeners: tuple[L, ...] = ()
        self._functions = functions
        # By purpose, while somebody listens.
        self._replaced: dict[str, Replacement] = {}

    def tell(self, listener: L) -> None:
        """Tell this listener, too, from now on."""
        self.listeners += (listener,)
        for purpose, make in self._functions(listener).items():
            if purpose not in self._replaced:
                self._replaced[purpose] = Replacement(purpose, make)

    def leave(self, *listeners: L) -> None:
        """Tell these listeners no more; without any, none."""
        self.listeners = tuple(other for other in self.listeners if listeners and other not in listeners)
        while self._replaced and not self.listeners:
            self._replaced.popitem()[1].undo()


def replace_for_good(purpose: str, make: Make, devices: Sequence[str] = ()) -> None:
    """Replace the functions of a purpose until the process ends."""
    assert TABLE[purpose].lasts, purpose
    Replacement(purpose, make, devices)


def functions_of(purpose: str, devices: Sequence[str] = ()) -> Iterator[tuple[Any, str]]:
    """The functions of a purpose that this torch has: their owners, and their names there."""
    for owner, name in _candidates(purpose, devices) if devices else _without_devices(purpose):
        if hasattr(owner, name):
            yield owner, name


@functools.cache  # a collective replaces functions, which must be quick
def _without_devices(purpose: str) -> list[tuple[Any, str]]:
    return list(_candidates(purpose))


def _candidates(purpose: str, devices: Sequence[str] = ()) -> Iterator[tuple[Any, str]]:
    for dotted, names in TABLE[purpose].functions.items():
        is_by_device = "{device}" in f"{dotted}{names}"
        for device in devices if is_by_device else ("",):
            owner = _owner(dotted.format(device=device))
            if owner is not None:
                yield from ((owner, name.format(device=device)) for name in names)


def _owner(dotted: str) -> Any:
    """A module, or a class in one; None where this torch has no such thing."""
    if dotted in sys.modules:
        # A function may hide it, as `torch.distributed.rendezvous` does.
        return sys.modules[dotted]
    module, *rest = dotted.split(".")
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for name in rest:
        module = f"{module}.{name}"
        if not hasattr(found, name):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                return None
        found = getattr(found, name)
    return found


def lines_of_table() -> Iterator[str]:
    """A line for each purpose, for people: why, which functions, and those of them that this torch lacks."""
    for row in TABLE.values():
        text = "; ".join(f"{owner}: {', '.join(names)}" for owner, names in row.functions.items())
        lacks = [
            f"{owner}.{name}"
            for owner, names in row.functions.items()
            for name in names
            if "{device}" not in f"{owner}{name}" and not hasattr(_owner(owner), name)
        ]
        missing = f" (this torch lacks {', '.join(lacks)})" if lacks else ""
        yield f"{row.why}: {text}{missing}".replace("{device}", "DEVICE")


@dataclass(frozen=True)
class ReplacedFunction:
    """A function of torch that somebody has replaced. `by`: who, the outermost first."""

    name: str
    by: tuple[str, ...]
    is_by_program: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(self.by)}"


# The owners of functions that programs replace.
_OWNERS = (
    *("torch", "torch.Tensor", "torch.nn.Module", "torch.optim.Optimizer", "torch.autograd", "torch.cuda"),
    *(
        "torch.distributed",
        _C10D,
        "torch.distributed.ProcessGroup",
        "torch.distributed.Work",
        "torch.distributed.Store",
    ),
)


def who_has_replaced_what() -> list[ReplacedFunction]:
    """The functions of torch that are replaced in this process, by this package or by the program."""
    if "torch.distributed" not in sys.modules:
        return []
    seen: dict[tuple[int, str], str] = {}
    for dotted in _OWNERS:
        owner = _owner(dotted)
        for name, value in vars(owner).items() if owner is not None else ():
            if (id(owner), name) in _layers or _is_of_program(value):
                seen[id(owner), name] = f"{dotted}.{name}"
    for key, stack in _layers.items():
        seen.setdefault(key, f"{_name_of(stack[0].owner)}.{stack[0].name}")
    owners = {id(_owner(dotted)): _owner(dotted) for dotted in _OWNERS}
    owners |= {key: stack[0].owner for (key, _), stack in _layers.items()}
    return [_described(text, owners[key[0]], key) for key, text in seen.items()]


def _described(text: str, owner: Any, key: tuple[int, str]) -> ReplacedFunction:
    value = vars(owner).get(key[1])
    layers = _layers.get(key, [])
    purposes = [f"torch_testing_ext {TABLE[layer.purpose].why}" for layer in reversed(layers)]
    is_ours = bool(layers) and layers[-1].is_on_top
    places = [_place_of(value)] if _is_of_program(value) and not is_ours else []
    return ReplacedFunction(text, (*places, *purposes), bool(places))


def _name_of(owner: Any) -> str:
    module = getattr(owner, "__module__", None)
    return owner.__name__ if module is None else f"{module}.{owner.__qualname__}"


def _is_of_program(value: Any) -> bool:
    """Whether an attribute of torch is a function of the program, or one of its pretended objects."""
    code = _code_of(value)
    if code is not None:
        return is_of_program(code.co_filename) and not is_of_torch(code.co_filename)
    return type(value).__module__ == "unittest.mock"


def _place_of(value: Any) -> str:
    code = _code_of(value)
    return "a mock" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _code_of(value: Any) -> CodeType | None:
    """The code of a function, a method or a property. Deprecated objects of torch warn about other questions."""
    function: Any = value.fget if type(value) is property else value
    if type(function) in (staticmethod, classmethod, MethodType):
        function = function.__func__
    return function.__code__ if type(function) is FunctionType else None
