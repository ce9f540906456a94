"""Values that a rank of a whole world does not know, since they were never communicated: who reads them, and where."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_testing_ext._collectives.sanitizer.operation_checks import Check, inputs_of, outputs_of
from torch_testing_ext._collectives.sanitizer.sanitizer_log import ALL
from torch_testing_ext._collectives.worlds.world_records import COMPARED, READ
from torch_testing_ext._torch import torch_frames, training
from torch_testing_ext._torch.operations import operation_hook, tensor_uses, works
from torch_testing_ext._torch.operations.operation_hook import OpSpec
from torch_testing_ext._torch.operations.tensor_uses import TensorUses
from torch_testing_ext._torch.tensors import nested_tensors


class WaitLog(Check):
    """Tells which operation has issued which work and written which tensors."""

    wants_results = True
    uses: RankUses

    def after(self, spec: OpSpec, args: tuple[Any, ...], result: Any, site: int, number: int) -> Any:
        outputs = outputs_of(spec, args)
        issuer = torch_frames.issuer_of(sys._getframe(2))
        is_vote = spec.kind == "recv" and torch_frames.is_vote(issuer)
        if is_vote:
            # The peer votes as this rank does.
            outputs[0].fill_(1)
        complete = works.with_complete_work(result, outputs or inputs_of(spec, args))
        is_awaited = operation_hook.is_synchronous(spec, args)
        self.uses.issued(number, None if is_awaited else works.work_of(complete), [] if is_vote else outputs)
        if torch_frames.is_of_reducer(issuer):
            self.uses.awaited_after_backward(number)
        return complete


class RankUses(TensorUses):  # type: ignore[no-untyped-call]
    """Follows the tensors of a rank: their bytes, and which of them depend on values of other ranks."""

    def __init__(self, on_wait: Callable[[int], None], on_value: Callable[[str, str], None]):
        """`on_value`: gets what happens to a value of other ranks, and the method by which."""
        super().__init__(None)
        self._on_wait_for = on_wait
        self._on_value = on_value
        # The bytes of each storage, and the latest call that its values depend on.
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._depends: dict[int, int] = {}
        self._works: dict[int, tuple[Any, int]] = {}
        # The futures of works, each with its work.
        self._futures: list[tuple[Any, Any]] = []
        # What the reducer of DDP has issued in the backward pass that runs.
        self._in_backward: list[int] = []
        self._bytes = 0
        self.most = 0
        # A value of other ranks has been read.
        self.has_read = False
        self._asserts = 0

    # -- assertions of a test, which may be about values that nobody has communicated

    @contextlib.contextmanager
    def _asserting(self) -> Iterator[None]:
        """A context in which such a value may be read: that is noted, and no warning."""
        self._asserts += 1
        try:
            yield
        finally:
            self._asserts -= 1

    def leave_assertions(self, case: type) -> None:
        """Let the assertions of a class, and of all that derive from it, end no rank for such values."""
        for name, function in list(vars(case).items()):
            if name.startswith("assert") and inspect.isfunction(function):
                setattr(case, name, self.not_judging(function))
        heirs: list[type] = case.__subclasses__()
        for heir in heirs:
            self.leave_assertions(heir)

    def not_judging(self, assertion: Callable[..., Any]) -> Callable[..., Any]:
        """An assertion that notes its line instead, if it is about such values."""

        @functools.wraps(assertion)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._asserting():
                    return assertion(*args, **kwargs)
            except AssertionError:
                if not self.has_read:
                    raise
                self._on_value(COMPARED, "")
                return None

        return call

    def without_differences(self, find: Callable[..., Any]) -> Callable[..., Any]:
        """Leave differences between such values out of what `find` has found."""

        @functools.wraps(find)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._asserting():
                found = find(*args, **kwargs)
            if not found or not self.has_read:
                return found
            self._on_value(COMPARED, "")
            return []

        return call

    # -- calls

    def issued(self, number: int, work: Any, outputs: Sequence[torch.Tensor]) -> None:
        if work is not None:
            self._works[id(work)] = work, number
        for tensor in outputs:
            self._hold(tensor, number)

    def issuer_of(self, tensor: torch.Tensor) -> int | None:
        """The latest call that the values of a tensor depend on."""
        return self._depends.get(_storage(tensor))

    def waited(self, work: Any) -> None:
        """Somebody waits for a work."""
        _, number = self._works.pop(id(work), (None, None))
        if number is not None:
            self._on_wait_for(number)

    def awaited_after_backward(self, number: int) -> None:
        """C++ waits for a call at the end of the backward pass that runs."""
        if not self._in_backward:
            training.at_end_of_backward(self._backward_ends)
        self._in_backward.append(number)

    def _backward_ends(self) -> None:
        issued, self._in_backward = self._in_backward, []
        for number in issued:
            self._on_wait_for(number)

    def future_taken(self, work: Any, future: Any) -> None:
        """Somebody has the future of a work, and may wait for that."""
        self._futures.append((future, work))

    def future_used(self, future: Any) -> None:
        for known, work in self._futures:
            if known is future:
                self.waited(work)

    def future_chained(self, future: Any, result: Any) -> None:
        self._futures += [(result, work) for known, work in self._futures if known is future]

    def synchronize(self, *_: object, **__: object) -> None:
        """Stands for `synchronize` of devices."""
        self._on_wait_for(ALL)

    # -- reads

    def watched_copy(self, copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A method that copies a tensor to the host, which waits for its values."""

        @functools.wraps(copy)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            number = self._depends.get(_storage(tensor))
            if number is not None:
                self._on_wait_for(number)
            return copy(tensor, *args, **kwargs)

        return call

    def on_read(self, method: str, tensor: torch.Tensor) -> None:
        if method != "__repr__":
            self._read(method, tensor)

    def on_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """It has the same storage."""

    def _read(self, method: str, tensor: torch.Tensor) -> None:
        number = self._depends.get(_storage(tensor))
        if number is None:
            return
        self._on_wait_for(number)
        self.has_read = True
        self._on_value(COMPARED if self._asserts else READ, "" if self._asserts else f"{method}()")

    # -- operations

    def leaves(self, types: Any) -> bool:
        return any(kind.__module__.startswith(tensor_uses.OUTER) for kind in types)

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        for tensor in tensor_uses.seen_by_python(func, args):
            self._read(tensor_uses.name_in_python(func), tensor)
        # Some operations on lists work in place and return nothing.
        made = list(nested_tensors.tensors_in(args if result is None else result))
        if func.namespace == "_c10d_functional" and tensor_uses.name_of(func).endswith("wait_tensor"):
            number = self._depends.get(_storage(made[0])) if made else None
            if number is not None:
                self._on_wait_for(number)
            return
        depends = -1
        if self._depends:
            for tensor in nested_tensors.tensors_in((args, kwargs)):
                depends = max(depends, self._depends.get(_storage(tensor), -1))
        for tensor in made:
            self._hold(tensor, depends)

    def _hold(self, tensor: torch.Tensor, depends: int) -> None:
        """Count the storage of a tensor while it lives, and keep what its values depend on."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # it has none
            return
        if depends >= 0:
            # An operation that issues a call gives what that call has written.
            key = training.key_of(storage)
            self._depends[key] = max(depends, self._depends.get(key, -1))
        self._count(storage)

    def _count(self, storage: Any) -> None:
        """Count the bytes of a storage, which may have another size than before."""
        key, size = training.key_of(storage), storage.nbytes()
        before, reference = self._storages.get(key, (0, None))
        if reference is not None and size == before:
            return
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._free(key))
        self._storages[key] = size, reference
        self._bytes += size - before
        self.most = max(self.most, self._bytes)

    def watched_resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """A method by which FSDP frees the parameters that it has gathered; no operation tells of that."""

        @functools.wraps(resize)
        def call(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if training.key_of(storage) in self._storages:
                self._count(storage)
            return result

        return call

    def _free(self, key: int) -> None:
        size, _ = self._storages.pop(key)
        self._depends.pop(key, None)
        self._bytes -= size


def _storage(tensor: torch.Tensor) -> int:
    try:
        return training.storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return 0
