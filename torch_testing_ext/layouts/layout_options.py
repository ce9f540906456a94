"""The arguments that the mark, the decorator and `check_layouts` share, and whether they mean something."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from torch_testing_ext._process.words import nearest
from torch_testing_ext.launch.most_ranks import too_many
from torch_testing_ext.layouts.layout_text import SINGLE, parse_axes, parse_steps
from torch_testing_ext.layouts.training_looks import DATA_AXES, SEQUENCE_AXES


@dataclass(frozen=True)
class LayoutOptions:
    """The arguments that the mark, the decorator and `check_layouts` share."""

    reference: str = SINGLE
    dtypes: tuple[torch.dtype, ...] = (torch.float64,)
    # Names of axes that cut samples, and of those that cut positions.
    data: tuple[str, ...] = DATA_AXES
    sequence: tuple[str, ...] = SEQUENCE_AXES
    # The steps before an arrow.
    save_after: int = 1
    # Moves weights of one value, in which no mistake would show.
    generic: bool = True
    seed: int = 1234
    timeout: float | None = None
    # Any other number than 0 gives each rank an accelerator.
    devices: int = 0
    # Makes each tensor that is not compared an error.
    strict: bool = False


def checked_options(texts: Sequence[str], given: dict[str, Any]) -> LayoutOptions:
    """The options of layouts. Raises TypeError for an unknown one, and ValueError for a wrong value."""
    known = [field.name for field in fields(LayoutOptions)]
    for name in given:
        if name not in known:
            raise TypeError(f"layouts have no argument {name}; there are {', '.join(known)}.{nearest(name, known)}")
    options = LayoutOptions(**given)
    data, sequence = _names("data", options.data), _names("sequence", options.sequence)
    options = replace(options, dtypes=_dtypes(options.dtypes), data=data, sequence=sequence)
    for name in ("generic", "strict"):
        if not isinstance(getattr(options, name), bool):
            raise ValueError(f"{name} is {getattr(options, name)!r}; it must be True or False")
    for name, least in (("save_after", 1), ("seed", 0), ("devices", 0)):
        _check_number(name, getattr(options, name), least)
    timeout = options.timeout
    if timeout is not None and not (_is_number(timeout, (int, float)) and 0 < timeout < math.inf):
        raise ValueError(f"timeout is {timeout!r}; it must be a positive number of seconds")
    _check_texts(texts, options)
    return options


def _check_texts(texts: Sequence[str], options: LayoutOptions) -> None:
    if not texts:
        raise ValueError("no layout is given: write at least one, such as 'tp=2'")
    if parse_axes(options.reference):
        raise ValueError(f"the reference is {options.reference!r}; it must be one rank: 'single'")
    for text in texts:
        parts = parse_steps(text)
        sizes = [math.prod(parse_axes(part).values()) for part in parts]
        for part, size in zip(parts, sizes, strict=True):
            if why := too_many(size):
                raise ValueError(f"the layout is {part!r}; {why}")
        if sizes == [1]:
            raise ValueError(f"{text!r} is one rank, as the reference is, so that nothing would be compared")
        if list(texts).count(text) > 1:
            raise ValueError(f"{text!r} is given twice")


def _dtypes(given: Any) -> tuple[torch.dtype, ...]:
    dtypes = (given,) if isinstance(given, torch.dtype) else tuple(given) if isinstance(given, Iterable) else ()
    if not dtypes or not all(isinstance(each, torch.dtype) and each.is_floating_point for each in dtypes):
        raise ValueError(f"dtypes is {given!r}; it must have types of floating point, such as torch.float64")
    return dtypes


def _names(name: str, given: Any) -> tuple[str, ...]:
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not all(isinstance(each, str) and each.isidentifier() for each in names):
        raise ValueError(f"{name} is {given!r}; it must have names of axes, such as ('dp',)")
    return names


def _check_number(name: str, given: Any, least: int) -> None:
    if not _is_number(given, int) or given < least:
        raise ValueError(f"{name} is {given!r}; it must be a number, {least} or more")


def _is_number(given: Any, kinds: Any) -> bool:
    return isinstance(given, kinds) and not isinstance(given, bool)
