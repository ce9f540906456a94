"""Entries of torch's flight recorders: what their keys say of a call.

Sends, receives and monitored barriers over gloo have such entries, too, which `gloo_messages` writes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch_testing_ext._torch.torch_frames import is_of_program

# The backend of fake accelerators. gloo computes and records for it, and has this as the description of the group.
THROUGH_GLOO = "fakeccl"
_GLOO = "gloo"
# The names that torch's C++ has for the types whose names differ in Python.
_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


class RecordedEntry(NamedTuple):
    """A call, as the recorder of its backend has it: 2.11 to 2.15."""

    fields: Mapping[str, Any]

    @property
    def number(self) -> int:
        """Its place among all that the recorder has noted."""
        return int(self.fields.get("record_id", 0))

    @property
    def group(self) -> str:
        """The name of its group."""
        return str(self.fields["process_group"][0])

    @property
    def group_id(self) -> Any:
        """The number that the backend has for the group."""
        return self.fields["pg_id"]

    @property
    def created(self) -> int:
        """The time at which it was issued, in nanoseconds."""
        return int(self.fields.get("time_created_ns", 0))

    @property
    def sequence_number(self) -> int:
        """Its number among the collectives of its group."""
        return int(self.fields["collective_seq_id"])

    @property
    def is_p2p(self) -> bool:
        return bool(self.fields.get("is_p2p"))

    @property
    def message(self) -> int | None:
        """Its number among the messages that we have noted; None for what torch has recorded."""
        return self.fields.get("message")

    @property
    def messages(self) -> int:
        """The messages that have used up numbers of its group: this one, or those that a barrier is made of."""
        return int(self.fields.get("is_issued", self.fields.get("messages", 0)))

    @property
    def tags(self) -> int:
        """The numbers of collectives that a call without one has used up."""
        return int(self.fields.get("tags", 0))

    @property
    def peer(self) -> int | None:
        return self.fields.get("peer")

    @property
    def tag(self) -> int:
        return int(self.fields.get("tag", 0))

    @property
    def kind(self) -> str:
        """The name of the operation, such as all_reduce."""
        return self._name.rpartition(":")[2]

    @property
    def backend(self) -> str:
        """The backend of the group that has issued the call: a group may have one for each kind of device."""
        return THROUGH_GLOO if THROUGH_GLOO in self.fields.get("process_group", ()) else self._recorded_by

    @property
    def what_members_share(self) -> tuple[Any, ...]:
        """The properties that can be compared cheaply, and are alike on all members."""
        return self.fields["profiling_name"], self.fields["input_sizes"], self.fields["input_dtypes"]

    @property
    def shapes(self) -> tuple[str, ...]:
        return tuple(str(list(size)) for size in self.fields.get(f"{self._side}_sizes") or ())

    @property
    def inputs(self) -> tuple[str, ...]:
        """The shape and type of each tensor. There may be fewer types than shapes."""
        dtypes = [_DTYPES.get(name, name.lower()) for name in self.fields.get(f"{self._side}_dtypes") or ()]
        typed = itertools.zip_longest(self.shapes, dtypes[: len(self.shapes)], fillvalue="")
        return tuple(f"{shape} {dtype}".rstrip() for shape, dtype in typed)

    @property
    def _side(self) -> str:
        # Only the root of a scatter has inputs.
        return "output" if self.kind == "scatter" else "input"

    def sizes_and_types(self, side: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The numbers of each tensor of a side, "input" or "output", and torch's names of their types."""
        sizes = tuple(math.prod(size) for size in self.fields.get(f"{side}_sizes") or ())
        return sizes, tuple(self.fields.get(f"{side}_dtypes") or ())

    @property
    def compared_side(self) -> str | None:
        """The side on which the tensors of all members agree; None for both."""
        if self._recorded_by == _GLOO and self.kind == "scatter":
            return "output"
        if (self._recorded_by == _GLOO and self.kind in ("all_gather", "gather")) or self.message is not None:
            return "input"
        return None

    @property
    def timeout(self) -> float:
        """In seconds."""
        milliseconds = self.fields.get("timeout_ms")
        return milliseconds / 1000 if milliseconds else math.inf

    @property
    def tells_end(self) -> bool:
        """Whether its backend says when a call is over: some retire it as soon as it is issued."""
        return "retired" in self.fields and not self._is_only_issued

    @property
    def is_over(self) -> bool:
        # It is retired before it is over, as a call of NCCL is at its time-out.
        was_given_up = self._recorded_by != _GLOO and self.fields.get("state") == "started"
        return bool(self.fields.get("retired")) and not self._is_only_issued and not was_given_up

    @property
    def _is_only_issued(self) -> bool:
        # gloo retires a call at its end, and leaves it "scheduled" all the same.
        is_scheduled = self.fields.get("state") == "scheduled"
        return self._recorded_by != _GLOO and bool(self.fields.get("retired")) and is_scheduled

    def places(self, folder: str) -> Iterator[tuple[str, int, str]]:
        """The file, line and function of each frame of the program, innermost first. `folder`: of torch."""
        for frame in self.fields.get("frames", ()):
            file = frame["filename"]
            if is_of_program(file) and not file.startswith(folder):
                yield file, frame["line"], frame["name"]

    @property
    def _name(self) -> str:
        return str(self.fields.get("profiling_name", "?"))

    @property
    def _recorded_by(self) -> str:
        return self._name.rpartition(":")[0]

    def numbered(self, number: int) -> RecordedEntry:
        """The same, with another place."""
        return RecordedEntry({**self.fields, "record_id": number})
