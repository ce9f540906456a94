"""Values for assertEqual, each compared with every other by our test case and by PyTorch's.

The script runs in a process of its own, since PyTorch's test package changes global state when imported. It prints,
as JSON, how many comparisons were made and on which of them the two test cases do not agree.

With the word `chosen` it compares by equivalence classes: every two values of one kind, every value with the first one
of every other kind, and with options those values of each kind that differ in what the options change.
"""

import collections
import dataclasses
import enum
import itertools
import json
import os
import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class MyInt(int):
    pass


class Plain:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Plain) and self.value == other.value

    __hash__ = None


class Unorderable:
    def __eq__(self, other):
        raise KeyError("no comparison")

    __hash__ = None


class MySubclass(torch.Tensor):
    pass


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    name: str
    size: int


VALUES = {
    "none": lambda: None,
    "true": lambda: True,
    "false": lambda: False,
    "np.true": lambda: np.bool_(True),
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "3": lambda: 3,
    "2**70": lambda: 2**70,
    "1.0": lambda: 1.0,
    "1+1e-6": lambda: 1.000001,
    "1+1e-4": lambda: 1.0001,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1+0j": lambda: 1 + 0j,
    "nan+0j": lambda: complex("nan"),
    "np.int64": lambda: np.int64(1),
    "np.float64": lambda: np.float64(1.0),
    "np.float32 nan": lambda: np.float32("nan"),
    "my int": lambda: MyInt(1),
    "intenum": lambda: Level.LOW,
    "enum": lambda: Colour.RED,
    "str": lambda: "abc",
    "other str": lambda: "abd\nxyz",
    "empty str": lambda: "",
    "bytes": lambda: b"abc",
    "bytearray": lambda: bytearray(b"abc"),
    "ints like bytes": lambda: [97, 98, 99],
    "empty list": list,
    "empty tuple": lambda: (),
    "[1]": lambda: [1],
    "(1,)": lambda: (1,),
    "[1, 2]": lambda: [1, 2],
    "[1, [2]]": lambda: [1, [2]],
    "[1.0, 2.0]": lambda: [1.0, 2.0],
    "['a']": lambda: ["a"],
    "range": lambda: range(1, 3),
    "deque": lambda: collections.deque([1, 2]),
    "size": lambda: torch.Size([1, 2]),
    "namedtuple": lambda: Point(1, 2),
    "set": lambda: {1, 2},
    "other set": lambda: {1, 3},
    "frozenset": lambda: frozenset({1, 2}),
    "dict": lambda: {"a": 1, "b": 2},
    "dict reversed": lambda: {"b": 2, "a": 1},
    "ordered dict": lambda: collections.OrderedDict(a=1, b=2),
    "dict other key": lambda: {"a": 1, "c": 2},
    "dict other value": lambda: {"a": 1, "b": 3},
    "dict mixed keys": lambda: {1: 1, "b": 2},
    "dict of tensor": lambda: {"a": torch.ones(2)},
    "empty dict": dict,
    "int type": lambda: int,
    "float type": lambda: float,
    "dtype": lambda: torch.float32,
    "other dtype": lambda: torch.float64,
    "device": lambda: torch.device("cpu"),
    "device 0": lambda: torch.device("cpu", 0),
    "device str": lambda: "cpu",
    "layout": lambda: torch.strided,
    "object": lambda: Plain(1),
    "other object": lambda: Plain(2),
    "object of tensor": lambda: Plain(torch.tensor(1)),
    "raising object": Unorderable,
    "dataclass": lambda: Record("a", 1),
    "other dataclass": lambda: Record("a", 2),
    "exception": lambda: ValueError("x"),
    "0-d": lambda: torch.tensor(1.0),
    "0-d int": lambda: torch.tensor(1),
    "0-d bool": lambda: torch.tensor(True),
    "0-d nan": lambda: torch.tensor(float("nan")),
    "one": lambda: torch.ones(1),
    "ones": lambda: torch.ones(2),
    "ones close": lambda: torch.ones(2) + 1e-6,
    "ones far": lambda: torch.ones(2) + 1e-3,
    "1, 2": lambda: torch.tensor([1, 2]),
    "1., 2.": lambda: torch.tensor([1.0, 2.0]),
    "nans": lambda: torch.tensor([1.0, float("nan")]),
    "ones double": lambda: torch.ones(2, dtype=torch.float64),
    "ones half": lambda: torch.ones(2, dtype=torch.half),
    "ones bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "ones complex": lambda: torch.ones(2, dtype=torch.complex64),
    "ones bool": lambda: torch.ones(2, dtype=torch.bool),
    "ones uint16": lambda: torch.ones(2, dtype=torch.uint16),
    "ones float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "ones 1x2": lambda: torch.ones(1, 2),
    "ones 2x2": lambda: torch.ones(2, 2),
    "ones 2x2 strided": lambda: torch.ones(2, 2).t(),
    "ones 2x2 every other": lambda: torch.ones(2, 4)[:, ::2],
    "empty tensor": lambda: torch.empty(0),
    "empty 2-d": lambda: torch.empty(0, 2),
    "meta": lambda: torch.ones(2, device="meta"),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "requires grad": lambda: torch.ones(2, requires_grad=True) * 1,
    "subclass": lambda: torch.ones(2).as_subclass(MySubclass),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse ones": lambda: torch.ones(2, 2).to_sparse(),
    "sparse uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0, 1], [0, 0, 1]], [0.5, 0.5, 1.0], (2, 2)),
    "dense eye": lambda: torch.eye(2),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "csc": lambda: torch.eye(2).to_sparse_csc(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    "quantized other": lambda: torch.quantize_per_tensor(torch.ones(2) * 2, 0.5, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested other": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "list of tensors": lambda: [torch.ones(2), torch.ones(3)],
    "list of 0-d": lambda: [torch.tensor(1.0), torch.tensor(1.0)],
    "array": lambda: np.ones(2, dtype=np.float32),
    "array double": lambda: np.ones(2),
    "array int": lambda: np.array([1, 2]),
    "array 0-d": lambda: np.array(1),
    "array bool": lambda: np.array([True]),
    "array str": lambda: np.array(["a"]),
    "array object": lambda: np.array([1, "a"], dtype=object),
    "module list": lambda: torch.nn.ModuleList([torch.nn.Identity()]),
    "parameter list": lambda: torch.nn.ParameterList([torch.ones(2)]),
    "parameter dict": lambda: torch.nn.ParameterDict({"a": torch.ones(2)}),
    "module": lambda: torch.nn.Identity(),
    "storage": lambda: torch.ones(2).storage(),
    "other storage": lambda: torch.zeros(2).storage(),
    "untyped storage": lambda: torch.ones(2).untyped_storage(),
    "deep": lambda: {"a": [1, {"b": (torch.ones(2), None, "x")}], "c": 2.0},
    "deep other": lambda: {"a": [1, {"b": (torch.zeros(2), None, "x")}], "c": 2.0},
    "lambda": lambda: len,
}

OPTIONS = {
    "exact": {"rtol": 0, "atol": 0},
    "loose": {"rtol": 0.1, "atol": 0.1},
    "half a tolerance": {"rtol": 0.1},
    "other half": {"atol": 0.1},
    "any dtype": {"exact_dtype": False},
    "no nan": {"equal_nan": False},
    "device": {"exact_device": True},
    "layout": {"exact_layout": True},
    "stride": {"exact_stride": True},
}

# Kinds of values, by their types. The first one of each kind stands for it in comparisons with other kinds.
KINDS = {
    "truth": (bool, np.bool_, type(None)),
    "number": (int, float, complex, np.number, enum.Enum),
    "tensor": (torch.Tensor,),
    "array": (np.ndarray,),
    "text": (str, bytes, bytearray),
    "sequence": (list, tuple, range, collections.deque, torch.nn.ModuleList, torch.nn.ParameterList),
    "set": (set, frozenset),
    "mapping": (dict, torch.nn.ParameterDict),
    "other": (object,),
}
# One for each thing that an option changes: tolerance, dtype, NaN, device, layout and stride.
CHOSEN = """
    1, 1+1e-4, nan, 1+0j, np.float64, deep, 0-d nan, ones, ones far, nans, ones double, ones bool, ones float8,
    ones 2x2 strided, meta, sparse, csr, quantized, jagged, array
"""

# Values for which the options matter.
NUMERIC = """
    1, 1.0, 1+1e-6, 1+1e-4, nan, inf, 1+0j, nan+0j, np.float64, [1], deep, 0-d, 0-d nan, ones, ones close, ones far,
    nans, ones double, ones half, ones bfloat16, ones complex, ones bool, ones uint16, ones float8, ones 2x2,
    ones 2x2 strided, ones 2x2 every other, meta, parameter, sparse, dense eye, csr, csc, quantized,
    quantized other, jagged, array
"""

DTENSORS = {
    "shard": lambda mesh, tensor: tensor.distribute_tensor(torch.ones(4), mesh, [tensor.Shard(0)]),
    "shard far": lambda mesh, tensor: tensor.distribute_tensor(torch.zeros(4), mesh, [tensor.Shard(0)]),
    "replicate": lambda mesh, tensor: tensor.distribute_tensor(torch.ones(4), mesh, [tensor.Replicate()]),
    "partial": lambda mesh, tensor: tensor.DTensor.from_local(torch.ones(4), mesh, [tensor.Partial()]),
    "plain": lambda mesh, tensor: torch.ones(4),
    "list": lambda mesh, tensor: [1.0, 1.0, 1.0, 1.0],
    "number": lambda mesh, tensor: 1.0,
    "shard in a list": lambda mesh, tensor: [tensor.distribute_tensor(torch.ones(4), mesh, [tensor.Shard(0)])],
    "far in a list": lambda mesh, tensor: [tensor.distribute_tensor(torch.zeros(4), mesh, [tensor.Shard(0)])],
    "replicate in a list": lambda mesh, tensor: [tensor.distribute_tensor(torch.ones(4), mesh, [tensor.Replicate()])],
    "plain in a list": lambda mesh, tensor: [torch.ones(4)],
}


def outcome(case, first, second, options):
    try:
        case.assertEqual(first, second, **options)
    except AssertionError:
        return "different"
    except Exception:
        return "error"
    return "equal"


class Comparisons:
    """Counts comparisons by both test cases, and yields those on which they do not agree."""

    def __init__(self, ours, theirs):
        self.count = 0
        self.ours, self.theirs = ours, theirs

    def disagreements(self, values, pairs, options):
        for first, second in pairs:
            self.count += 1
            mine = outcome(self.ours, values[first](), values[second](), options)
            reference = outcome(self.theirs, values[first](), values[second](), options)
            if mine != reference:
                yield first, second, mine, reference


def every_pair(names):
    return list(itertools.product(names, repeat=2))


def chosen_pairs(names):
    """Every pair of one kind, and every value with the first one of each other kind, in both orders."""
    kinds = {name: kind_of(VALUES[name]()) for name in names}
    first_ones = {kinds[name]: name for name in reversed(names)}.values()
    return [
        (one, other)
        for one, other in every_pair(names)
        if kinds[one] == kinds[other] or one in first_ones or other in first_ones
    ]


def kind_of(value):
    return next(kind for kind, types in KINDS.items() if isinstance(value, types))


def names_in(text):
    return text.strip().replace("\n    ", " ").split(", ")


def main(chosen):
    from torch.testing._internal.common_utils import TestCase as Theirs

    from torch_testing_ext.common_utils import TestCase as Ours

    torch.set_num_threads(1)  # or threads that wait for each other take most of the time, to quantize two numbers
    warnings.simplefilter("ignore")
    pairs = chosen_pairs(list(VALUES)) if chosen else every_pair(VALUES)
    numeric = every_pair(names_in(CHOSEN if chosen else NUMERIC))
    default = Comparisons(Ours(), Theirs())
    found = {"default": list(default.disagreements(VALUES, pairs, {}))}
    for name, options in OPTIONS.items():
        found[name] = list(default.disagreements(VALUES, numeric, options))
    other = Comparisons(Ours(), Theirs())
    for case in (other.ours, other.theirs):
        case.precision, case.rel_tol = 1e-2, 1e-3
    found["precision"] = list(other.disagreements(VALUES, numeric, {}))
    values = dtensors()
    found["dtensor"] = list(default.disagreements(values, every_pair(values), {}))
    print(json.dumps({"count": default.count + other.count, "disagreements": found}), flush=True)
    os._exit(0)  # DTensors keep threads of gloo beyond the group, which may abort an interpreter that ends


def dtensors():
    from torch.distributed import tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    return {name: lambda make=make: make(mesh, tensor) for name, make in DTENSORS.items()}


if __name__ == "__main__":
    main("chosen" in sys.argv[1:])
