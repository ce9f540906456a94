"""Sees when the step reads what is not gathered yet: gradients of earlier calls, and parameters after an update.

Both are gathered only if something reads them. A mode that sees all functions of torch runs while there are any.
"""

import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_testing_ext._torch.spmd import disable_torch_function, meets_all, put_function_mode, storage_key

from .managed_params import ManagedParam, managed_by
from .roster import READS_KEPT, READS_UPDATED

_DESCRIPTIONS = """
    grad requires_grad shape dtype device layout is_leaf grad_fn ndim names is_cuda is_sparse is_quantized is_meta size
    dim numel nelement nbytes itemsize stride is_floating_point is_complex is_contiguous is_conj is_neg element_size
    requires_grad_ register_hook register_post_accumulate_grad_hook __hash__ has_names get_device
"""
_HARMLESS = frozenset(_DESCRIPTIONS.split())  # they do not look at values
_PROPERTIES = frozenset(("__get__", "__set__", "__delete__"))


class ReadWatch(TorchFunctionMode):
    """Gathers before a read. `kept` are gradients of earlier calls; `stale` are parameters whose rows are newer."""

    def __init__(self, gather_kept: Callable[[], None], settle: Callable[[bool], None]) -> None:
        super().__init__()
        self.kept: dict[int, ManagedParam] = {}
        self.stale: dict[int, tuple[ManagedParam, torch.Tensor]] = {}  # by storage
        self.updated: set[int] = set()  # storages of parameters that were gathered after their update
        self.noticed = 0  # reads, as in a roster
        self._gather_kept, self._settle = gather_kept, settle
        self._is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notice reads and writes of the gradients that are kept, and of parameters."""
        kwargs = kwargs or {}
        if self.kept and getattr(func, "__self__", None) is torch.Tensor.grad and id(args[0]) in self.kept:
            managed = self.kept[id(args[0])]
            if func.__name__ != "__get__":
                self.drop([managed])
            elif not _only_drops():
                self._notice_gradient(managed)
            elif managed.kept is not None:
                return torch.empty(0)  # it only asks whether there is a gradient
        if self.stale and meets_all(func, (*args, *kwargs.values())):
            self.settle(False)  # another rank may read before it
        if (self.stale or self.updated) and _reads(func):
            self._notice({storage_key(tensor) for tensor in _tensors((args, kwargs))})
        return func(*args, **kwargs)

    def _notice_gradient(self, managed: ManagedParam) -> None:
        self.noticed |= READS_KEPT
        if managed.kept is None:  # gathered, or averaged with that of a backward
            self.drop([managed])
        else:
            with self.pausing():
                self._gather_kept()

    def _notice(self, storages: set[int]) -> None:
        if not storages.isdisjoint(self.updated):
            self.noticed, self.updated = self.noticed | READS_UPDATED, set()
        if not storages.isdisjoint(self.stale):
            self.noticed |= READS_UPDATED
            self.settle()

    def pausing(self) -> AbstractContextManager[Any]:
        """Let the engine's own reads pass."""
        return disable_torch_function()

    def settle(self, reads: bool = True) -> None:
        """Meet the other ranks, and gather if one of them reads."""
        if self.stale:
            with self.pausing():
                self._settle(reads)

    def drop(self, params: Iterable[ManagedParam]) -> None:
        """Forget the gradients that these parameters have kept."""
        for managed in params:
            managed.kept = None
            self.kept.pop(id(managed.plain), None)

    def start(self) -> None:
        """Watch, if there is a reason."""
        if not self._is_on and (self.kept or self.stale or self.updated):
            self._is_on = True
            put_function_mode(self, True)

    def stop(self) -> None:
        """Stop at the end of a call."""
        self.kept, self.stale, self.updated = {}, {}, set()
        self.rest()

    def rest(self) -> None:
        """Stop if there is no reason to watch, until there is one again."""
        if self._is_on and not (self.kept or self.stale or self.updated):
            self._is_on = False
            put_function_mode(self, False)


def _reads(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in _PROPERTIES:
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name not in _HARMLESS


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)


def _only_drops() -> bool:
    """Is the caller torch's own `zero_grad`, which only sets gradients to None?"""
    frame = sys._getframe(2)
    code = frame.f_code
    is_torch = frame.f_globals.get("__name__", "").startswith("torch.")
    return is_torch and code.co_name == "zero_grad" and bool(frame.f_locals.get("set_to_none"))


def unmanaged_parameters(roots: Iterable[Any], known: Collection[int]) -> list[nn.Parameter]:
    """Parameters among the leaves of a graph that the engine does not manage. Other leaves are the rank's own.

    `known` are the identities of parameters that it does manage.
    """
    found = []
    seen = set()
    waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ != "AccumulateGrad":
            waiting += [following for following, _ in node.next_functions]
            continue
        leaf = node.variable
        if id(leaf) not in known and isinstance(leaf, nn.Parameter) and managed_by(leaf) is None:
            found.append(leaf)
    return found


class UseWatch(TorchFunctionMode):
    """Collects parameters that operations use, for a step in which no trainable one was found."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: dict[int, Any] = {}
        self.reached: list[torch.Tensor] = []  # by a backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notice reads and writes of the gradients that are kept, and of parameters."""
        for value in (*args, *(kwargs or {}).values()):
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, nn.Parameter) and each.requires_grad and id(each) not in self._hooks:
                    self._watch(each)
        return func(*args, **(kwargs or {}))

    def _watch(self, param: nn.Parameter) -> None:
        if managed_by(param) is None:
            hook = param.register_post_accumulate_grad_hook(self.reached.append)  # type: ignore[no-untyped-call]
            self._hooks[id(param)] = hook

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
