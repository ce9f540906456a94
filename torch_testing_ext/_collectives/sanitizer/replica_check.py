"""Digests of the tensors that all ranks of a group must hold alike, around each step of an optimizer.

A look at a model is a line of JSON in a file beside the log. The parent compares the looks of all ranks at the end.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as hooks_of_optimizers

from torch_testing_ext._collectives.findings.diverged_replicas import END, Look, Sum
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._torch.groups import made_groups
from torch_testing_ext._torch.tensors import replicated_tensors
from torch_testing_ext._torch.tensors.replicated_tensors import Replica
from torch_testing_ext._torch.torch_frames import is_in_method_of

from .files_beside_logs import looks_beside
from .flying_buffers import digest_of_all
from .operation_checks import Check

MOST_BYTES = 1 << 26
_NOT_COMPARED = ("fake", "threaded")


class ReplicaCheck(Check):
    """Looks at the models that an optimizer steps, before and after. It uses torch's own hooks, and removes them."""

    def __init__(self, log: Path, line: Callable[[], Site | None]):
        self._path = looks_beside(log)
        self._path.unlink(missing_ok=True)
        self._line = line
        # The keys of tensors, by owner and group.
        self._keys: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
        # Models of a kind and group.
        self._made: Counter[str] = Counter()
        # The names of parameters, by optimizer.
        self._names: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
        # The number of steps of each model.
        self._steps: Counter[str] = Counter()
        # Keeps the tensors of a look alive.
        self._latest: dict[str, tuple[list[Replica], Site | None]] = {}
        self._outermost: Any = None
        self._is_full = False
        self._pid = os.getpid()
        self._handles = [
            nn.modules.module.register_module_module_registration_hook(self._on_module),
            hooks_of_optimizers.register_optimizer_step_pre_hook(self._before),
            hooks_of_optimizers.register_optimizer_step_post_hook(self._after),
        ]

    def finish(self) -> None:
        """The test has returned: look once more, since ranks may have averaged after the last step."""
        for handle in self._handles:
            handle.remove()
        for model, (replicas, site) in self._latest.items():
            # A device that has failed.
            with suppress(RuntimeError):
                self._write(Look(model, END, site, _sums(replicas)))
        self._latest.clear()

    # -- hooks of torch

    def _on_module(self, owner: nn.Module, name: str, _: object) -> None:
        if name == "module" and isinstance(owner, DistributedDataParallel):
            self._key("DDP", owner, getattr(owner, "process_group", None))

    def _before(self, optimizer: Any, *_: object) -> None:
        if self._outermost is None or not is_in_method_of(self._outermost, sys._getframe(1)):
            self._outermost = optimizer
            self._look(optimizer, is_after=False)

    def _after(self, optimizer: Any, *_: object) -> None:
        # Others are a part of its step, as in ZeRO.
        if optimizer is self._outermost:
            self._outermost = None
            self._look(optimizer, is_after=True)

    # -- looks

    def _look(self, optimizer: Any, is_after: bool) -> None:
        if torch.compiler.is_compiling() or os.getpid() != self._pid:
            return
        for model, replicas in self._held_by(optimizer).items():
            if not is_after:
                self._steps[model] += 1
            point = 2 * self._steps[model] + is_after
            site = self._line()
            self._latest[model] = replicas, site
            self._write(Look(model, point, site, _sums(replicas)))

    def _held_by(self, optimizer: Any) -> dict[str, list[Replica]]:
        """The tensors of the models that an optimizer steps."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        replicas: dict[str, list[Replica]] = {}
        for owner, keys in list(self._keys.items()):
            if not isinstance(owner, DistributedDataParallel):
                continue
            if any(id(param) in stepped for param in owner.parameters()):
                for key in keys.values():
                    replicas[key] = replicated_tensors.tensors_of_ddp(owner)
        keys_of_groups: dict[Any, str | None] = {}
        for group, replica in replicated_tensors.dtensors_of(optimizer, lambda: self._names_of(optimizer)):
            if group not in keys_of_groups:
                keys_of_groups[group] = self._key(type(optimizer).__name__, optimizer, group)
            key_of_group = keys_of_groups[group]
            if key_of_group is not None:
                replicas.setdefault(key_of_group, []).append(replica)
        return replicas

    def _names_of(self, optimizer: Any) -> dict[int, str]:
        return self._names.get(optimizer) or self._names.setdefault(optimizer, replicated_tensors.names_around())

    def _key(self, kind: str, owner: Any, group: Any) -> str | None:
        """A text for the model of an owner that is alike on all members of the group; None if these do not meet."""
        known = _text_of_group(group)
        if known is None:
            return None
        keys = self._keys.setdefault(owner, {})
        if known not in keys:
            keys[known] = f"{kind} {self._made[kind + known]} {known}"
            self._made[kind + known] += 1
        return keys[known]

    def _write(self, look: Look) -> None:
        """Add a look to the file, unless that is too large. No descriptor stays, which a test could close."""
        with open(self._path, "a", encoding="utf-8") as file:
            full = file.tell() >= MOST_BYTES
            if full and not self._is_full:
                text = f"replicas are not compared from here on: their digests take {MOST_BYTES >> 20} MB ({look.site})"
                warnings.warn(text, RuntimeWarning, stacklevel=1)
            if not full:
                file.write(json.dumps(look) + "\n")
            self._is_full = full


def _sums(replicas: list[Replica]) -> dict[str, Sum]:
    sums: dict[str, Sum] = {}
    for number, replica in enumerate(replicas):
        name = replica.name
        if name in sums:
            # Two models may use a name.
            name = f"{name}, tensor {number}"
        sums[name] = digest_of_all(replica.tensor), list(replica.tensor.shape), replica.is_buffer
    return sums


def _text_of_group(group: Any) -> str | None:
    number = None if group is None else made_groups.number_of_group(group)
    if number is None:
        return None
    made = made_groups.made_groups()
    record = made[number]
    if len(record.members) < 2 or record.backend in _NOT_COMPARED:
        return None
    earlier = [(other.name, other.world) for other in made[:number]]
    generation = earlier.count((record.name, record.world))
    return json.dumps([record.name, record.description, record.members, generation, record.world])
