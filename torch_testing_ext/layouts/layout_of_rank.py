"""The layout in a rank: it loads the reference's weights, cuts batches and looks. It communicates nothing."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_testing_ext._torch.compared_training import before_norms, is_training
from torch_testing_ext._torch.tensors import pytrees
from torch_testing_ext.layouts.heard_calls import HeardCalls
from torch_testing_ext.layouts.layout_text import places_of
from torch_testing_ext.layouts.module_outputs import ModuleProbe
from torch_testing_ext.layouts.tensor_parts import (
    Part,
    bytes_of,
    copy_of_local,
    declared_part,
    is_dtensor,
    local_of,
    part_of_dtensor,
    whole_part,
)
from torch_testing_ext.layouts.training_looks import LABELS, LOAD, SAVE, RankLooks, Setup, TensorLook

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
__tracebackhide__ = True

# The parts of a name that wrappers add.
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
# Labels of this value do not count, as in torch's cross-entropy.
_IGNORED = -100
_WEIGHTS = "weights.pt"

Rename = Callable[[str], str]
Model = nn.Module | Sequence[nn.Module]


def canonical(name: str) -> str:
    """The name of a parameter or module without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _labels_among(batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor of a batch that has labels which do not count."""
    return next((each for each in batch if not each.is_floating_point() and bool((each == _IGNORED).any())), None)


def modules_of(model: Model) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


class Layout:
    """A layout of ranks, for the training under test: its axes, the reference's weights, and the values to compare."""

    def __init__(self, rank: int, axes: dict[str, int], setup: Setup):
        self.rank = rank
        # How plain tensors are cut, by patterns of names: `layout.dims["blocks.*.qkv"] = "tp ."`.
        self.dims: dict[str, str] = {}
        self.record_of_rank = RankLooks(places=places_of(rank, axes))
        self._axes = axes
        self._setup = setup
        self._looks = self.record_of_rank.looks
        # The step that ended last.
        self._step = setup.first_step - 1
        self._mesh: Any = None
        self._rename: Rename | None = None
        # Forwards of each model that was loaded, in the first step.
        self._forwards: dict[int, int] = {}
        self._save: Callable[[str], object] | None = None
        # The weights of the reference, of all models that were loaded.
        self._kept: dict[str, torch.Tensor] = {}
        self._has_seen_start = False
        self._has_seen_loaded = False
        # In a diagnosis run: the part of the first batch that alone is trained on.
        self.only: int | None = None
        self.samples = 0
        calls = HeardCalls(self.record_of_rank) if axes or setup.probe is not None else None
        self.probe = (
            None if setup.probe is None or calls is None else ModuleProbe(setup.probe, self.record_of_rank, calls)
        )

    def __repr__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self._axes.items()) or "single"

    # -- what the program asks

    @property
    def mesh(self) -> Any:
        """A mesh of all axes that the layouts of the test name; those that this one lacks have size 1."""
        if self._mesh is None:
            kind = "cpu"
            if self._setup.devices and (accelerator := torch.accelerator.current_accelerator()) is not None:
                kind = accelerator.type
            if not dist.is_initialized():
                dist.init_process_group("gloo" if kind == "cpu" else None)
            sizes = {**self._axes, **{name: 1 for name in self._setup.all_axes if name not in self._axes}}
            sizes = sizes or {"single": 1}
            self._mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return self._mesh

    def size(self, axis: str) -> int:
        """The number of ranks along an axis: 1 if the layout lacks it."""
        return self._axes.get(axis, 1)

    def place(self, axis: str) -> int:
        """The place of this rank along an axis."""
        return self.record_of_rank.places.get(axis, 0)

    def group(self, axis: str) -> Any:
        """The process group of this rank along an axis."""
        return self.mesh[axis].get_group()

    def use(self, mesh: Any) -> None:
        """Take this rank's places from a mesh of the program, whose dimensions have the names of axes."""
        names = tuple(mesh.mesh_dim_names or ())
        for axis, size in self._axes.items():
            if axis in names:
                if mesh[axis].size() != size:
                    raise ValueError(f"the mesh has {mesh[axis].size()} ranks along {axis}, the layout {size}")
                self.record_of_rank.places[axis] = mesh[axis].get_local_rank()
            elif size > 1:
                raise ValueError(f"the mesh has no dimension {axis}; it has {', '.join(names) or 'no names'}")

    def load(self, model: Any, name: Rename | None = None) -> Any:
        """Give the model the reference's weights, before or after it is cut, and return the model.

        `name` turns a name of this rank into that of the reference.
        """
        self._rename = name or self._rename
        for module in modules_of(model):
            # A function: a copy of the model must not copy this object.
            module.register_forward_pre_hook(lambda module, _: self._count(module))
        if self._setup.makes_weights and self.only is None:
            self._keep_weights(model)
            return model
        wanted: dict[str, torch.Tensor] = torch.load(os.path.join(self._setup.folder, _WEIGHTS), weights_only=True)
        with torch.no_grad():
            for title, param in self._named(model):
                if title not in wanted:
                    near = difflib.get_close_matches(title, wanted, 1, 0.0)
                    hint = f"; the nearest is {near[0]}" if near else ""
                    raise ValueError(f"the reference has no parameter {title}{hint}: give load(name=...)")
                self._fill(title, param, wanted[title])
        return model

    def _keep_weights(self, model: Model) -> None:
        """Move weights of one value, such as zeros and ones, and keep all for other runs."""
        for title, param in self._named(model):
            with torch.no_grad():
                if param.dtype != (dtype := self._dtype_of(param)):
                    param.data = param.data.to(dtype)
                # A trainer cuts its model over meshes of one rank, too.
                whole = local_of(param)
                if self._setup.generic and whole.numel() and bool((whole == whole.flatten()[0]).all()):
                    noise = torch.Generator().manual_seed(zlib.crc32(title.encode()))
                    whole += 0.1 * torch.randn(whole.shape, generator=noise, dtype=torch.float64).to(whole)
            self._kept[title] = copy_of_local(param)
        torch.save(self._kept, os.path.join(self._setup.folder, _WEIGHTS))

    def _fill(self, title: str, param: Any, whole: torch.Tensor) -> None:
        local = local_of(param)
        part = self._part(title, param, whole)
        if part is None:
            raise ValueError(
                f"{title} is {list(local.shape)} here and {list(whole.shape)} in the reference, and nothing says how "
                f"it is cut: load before cutting it, or write layout.dims[{title!r}] = 'tp .'"
            )
        moved = part.of(whole.to(self._dtype_of(param)))
        if moved.dtype != local.dtype:
            param.data = param.data.to(moved.dtype)
            local = local_of(param)
        local.copy_(moved + self._nudge(title, moved) if self._setup.nudge else moved)

    def _nudge(self, title: str, value: torch.Tensor) -> torch.Tensor:
        """One rounding error for each element, for a control run."""
        noise = torch.Generator().manual_seed(zlib.crc32(f"{title}{self._setup.nudge}".encode()))
        sign = torch.randint(0, 2, value.shape, generator=noise) * 2 - 1
        wide = torch.promote_types(value.dtype, torch.float64)
        return (value.to(wide) * sign * self._setup.unit).to(value.dtype)

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The type that a tensor of the program has in this run. Integers keep theirs."""
        if tensor.is_complex():
            return self._setup.dtype.to_complex()
        return self._setup.dtype if tensor.is_floating_point() else tensor.dtype

    def _count(self, module: nn.Module) -> None:
        if self._step < self._setup.first_step and is_training():
            self._forwards[id(module)] = self._forwards.get(id(module), 0) + 1
            self.record_of_rank.microbatches = max(self._forwards.values())

    def steps(self, steps: int) -> int:
        """The number of steps after which this rank stops: fewer than `steps` before an arrow, which saves there."""
        return steps if self._setup.end_step is None else min(steps, self._setup.end_step)

    def batches(self, make: Callable[[int], Any], steps: int) -> Iterator[Any]:
        """Yield this rank's part of each global batch, which `make(step)` returns: tensors, in a tuple, list or dict.

        Dimension 0 of each is cut over the data axes, dimension 1 over the sequence axes.
        """
        last = self.steps(steps)
        for step in range(self._setup.first_step, last if self.only is None else min(last, 1)):
            values, structure = pytrees.tree_flatten(make(step))
            whole = [each for each in values if isinstance(each, torch.Tensor) and each.dim()]
            if not whole:
                raise ValueError(f"there is no tensor of samples in the batch of step {step}")
            self.samples = whole[0].shape[0]
            whole = whole if self.only is None else self._only(whole, self.only)
            if (labels := _labels_among(whole)) is not None:
                counts = torch.tensor([int((labels != _IGNORED).sum()), labels.numel()])
                self._looks[step, LABELS, LABELS] = TensorLook(counts)
            cut = [self._cut(each.to(self._dtype_of(each))) for each in whole]
            self.saw(cut[0])
            parts = iter(cut)
            own = [next(parts) if isinstance(each, torch.Tensor) and each.dim() else each for each in values]
            yield pytrees.tree_unflatten(own, structure)

    def _only(self, batch: list[torch.Tensor], part: int) -> list[torch.Tensor]:
        """The batch with only one part that counts: by labels of -100 elsewhere if it has such, else one sample."""
        row, chunk = divmod(part, self._setup.chunks)
        labels = _labels_among(batch)
        if labels is None:
            return [each[row : row + 1] for each in batch]
        kept = torch.full_like(labels, _IGNORED)
        columns = torch.arange(labels.shape[1]).chunk(self._setup.chunks)[chunk] if labels.dim() > 1 else slice(None)
        kept[row, columns] = labels[row, columns]
        return [kept if each is labels else each for each in batch]

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        kinds = ((self._setup.data, "samples"), (self._setup.sequence, "positions"))
        for dim, (names, what) in enumerate(kinds):
            for axis, size in self._axes.items():
                if axis in names and dim < tensor.dim():
                    if tensor.shape[dim] % size:
                        raise ValueError(f"{tensor.shape[dim]} {what} do not divide over {axis}={size}")
                    tensor = tensor.chunk(size, dim)[self.place(axis)]
        return tensor.contiguous()

    def saw(self, samples: torch.Tensor) -> None:
        """Note the samples that this rank trains on in the next step. A program with its own loader calls it."""
        key = (self._step + 1, "data", "samples")
        rows = torch.tensor([zlib.crc32(bytes_of(row)) for row in copy_of_local(samples)])
        known = self._looks.get(key)
        self._looks[key] = TensorLook(rows if known is None or known.local is None else torch.cat([known.local, rows]))

    def record(self, **values: Any) -> None:
        """Note numbers of the step that is under way, such as `loss=`, `norm=` or `balance=`."""
        for name, value in values.items():
            if value is not None:
                kind = name if name in ("loss", "norm") else "value"
                part = part_of_dtensor(value) if is_dtensor(value) else None
                self._looks[self._step + 1, kind, name] = TensorLook(copy_of_local(torch.as_tensor(value)), part)

    def loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a loss function: the sum of a step's calls is the loss of the step."""

        @functools.wraps(function)
        def recorded(*args: Any, **options: Any) -> Any:
            value = function(*args, **options)
            if not torch.as_tensor(value).is_meta:
                known = self._looks.get((self._step + 1, "loss", "loss"))
                before = 0 if known is None or known.local is None else known.local
                self._looks[self._step + 1, "loss", "loss"] = TensorLook(copy_of_local(torch.as_tensor(value)) + before)
            return value

        return recorded

    def attach(self, model: Any, mesh: Any = None, name: Rename | None = None) -> None:
        """Load, watch, and note the samples that the model is called with: all that a trainer with its own loop needs.

        `mesh`: the program's own, with named dimensions, if it has one.
        """
        if mesh is not None:
            self.use(mesh)
        self.load(model, name)
        self.watch(model)
        for module in modules_of(model):
            module.register_forward_pre_hook(lambda _, args, named: self._saw_input(args, named), with_kwargs=True)

    def _saw_input(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = next(
            (each for each in (*args, *named.values()) if type(each) is torch.Tensor and not each.is_meta), None
        )
        if given is not None and is_training() and self.place("pp") == 0 and not given.requires_grad:
            self.saw(given)

    def watch(self, model: Any, optimizer: Any = None) -> None:
        """Look at the model before and after each step of any torch optimizer that owns its parameters.

        `optimizer`: one that is not torch's, such as Megatron's, which steps copies of them.
        """
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            step = optimizer.step

            @functools.wraps(step)
            def stepped(*args: Any, **options: Any) -> Any:
                self._before(model)
                result = step(*args, **options)
                self._after(model, [])
                return result

            optimizer.step = stepped
            return
        steps: dict[int, int] = {}
        first = self._setup.first_step
        mine = {id(param) for _, param in self._named(model)}

        def held(optimizer: Any) -> set[int]:
            return mine & {id(param) for group in optimizer.param_groups for param in group["params"]}

        def before(optimizer: Any, *_: Any) -> None:
            if held(optimizer):
                self._before(model, steps.get(id(optimizer), first), held(optimizer), [optimizer])

        def after(optimizer: Any, *_: Any) -> None:
            if held(optimizer):
                step = steps.get(id(optimizer), first)
                self._end_step(step)
                self._after(model, [optimizer], step, held(optimizer))
                steps[id(optimizer)] = step + 1

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
        before_norms(lambda: self._before(model))

    def step(self, model: Any, optimizer: Any, loss: Any = None, clip: Any = None, scheduler: Any = None) -> None:
        """Look at loss and gradients, clip, step, look at parameters and states, and clear the gradients.

        `clip`: a number, or a function of the model that clips and returns the norm.
        """
        self.record(loss=loss)
        self._before(model, optimizers=[optimizer])
        if clip is not None:
            self.record(norm=clip(model) if callable(clip) else clip_gradients(modules_of(model), clip))
            self._before(model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        self._after(model, [optimizer])
        optimizer.zero_grad()

    def gradients(self, model: Any) -> None:
        """Look at gradients now. A program that clips by hand calls it before."""
        self._before(model)

    def checkpoint(self, save: Callable[[str], object], load: Callable[[str], object]) -> None:
        """Say how the program saves to a folder, and loads from one. Loads at once in ranks that continue."""
        self._save = save
        if self._setup.phase == LOAD:
            load(os.path.join(self._setup.folder, "checkpoint"))

    # -- what it looks at

    def end(self) -> None:
        """Save, if ranks of another layout continue."""
        if self._setup.phase != "whole" and self._save is None:
            arrow = f"{self._setup.arrow!r} saves and loads"
            raise ValueError(f"{arrow}: call layout.checkpoint(save, load) before the first step")
        last = self._setup.end_step
        if last is not None and self._step >= last:
            raise ValueError(
                f"the program trained {self._step + 1} steps, and saves after {last}: take its steps from "
                f"layout.batches, or stop it after layout.steps({self._step + 1})"
            )
        if self._setup.phase == SAVE and self._save is not None:
            self._save(os.path.join(self._setup.folder, "checkpoint"))

    def _named(self, model: Model, buffers: bool = False) -> Iterator[tuple[str, Any]]:
        for module in modules_of(model):
            for name, tensor in module.named_buffers() if buffers else module.named_parameters():
                known = canonical(name)
                yield (self._rename(known) if self._rename else known), tensor

    def _part(self, name: str, param: Any, whole: torch.Tensor) -> Part | None:
        """The part of a parameter that this rank holds, as far as the parameter tells."""
        if is_dtensor(param):
            return part_of_dtensor(param)
        if tuple(param.shape) == tuple(whole.shape):
            return whole_part(param)
        declared = self._declared(name, param)
        return None if declared is None else declared_part(declared, param, whole, self.record_of_rank.places)

    def _declared(self, name: str, param: Any) -> list[tuple[int, str]] | None:
        for pattern, text in self.dims.items():
            if fnmatch.fnmatchcase(name, pattern):
                return [(dim, axis) for dim, axis in enumerate(text.split()) if axis != "."]
        if getattr(param, "tensor_model_parallel", False):
            return [(param.partition_dim, "tp")]
        return None

    def _before(
        self, model: Model, step: int | None = None, only: set[int] | None = None, optimizers: Sequence[Any] = ()
    ) -> None:
        """Look at gradients, and before the first step at weights."""
        step = self._step + 1 if step is None else step
        is_first = step == self._setup.first_step
        if is_first and self._setup.phase != LOAD and not self._has_seen_start:
            self._has_seen_start = True
            self._look_at_parameters(model, "start", -1)
        if is_first and self._setup.phase == LOAD:
            if not self._has_seen_loaded:
                # Several optimizers each have a part of them.
                self._has_seen_loaded = only is None
                self._look_at_parameters(model, "param", step - 1, only)
            self._look_at_states(model, optimizers, step - 1)
        if self.probe is not None:
            modules = modules_of(model)
            names = {id(part): canonical(name) for each in modules for name, part in each.named_modules()}
            self.probe.finish(names, [id(each) for each in modules], step)
        for name, param in self._named(model):
            # One that a rank has frozen has none, which is told if the reference has one.
            if param.is_floating_point() or param.is_complex():
                if only is not None and id(param) not in only:
                    continue
                gradient = param.grad if param.grad is not None else getattr(param, "main_grad", None)
                # Whoever clips has looked before.
                kind = "clipped" if (step, "grad", name) in self._looks else "grad"
                self._note((step, kind, name), param, gradient)

    def _end_step(self, step: int) -> None:
        self._step = max(self._step, step)
        self.record_of_rank.steps = self._step + 1

    def _after(
        self, model: Model, optimizers: Sequence[Any], step: int | None = None, only: set[int] | None = None
    ) -> None:
        """Look at parameters, states and buffers."""
        if step is None:
            step = self._step + 1
            self._end_step(step)
        self._look_at_parameters(model, "param", step, only)
        self._look_at_states(model, optimizers, step)
        for name, buffer in self._named(model, buffers=True):
            if buffer.is_floating_point():
                self._note((step, "buffer", name), buffer, buffer)

    def _look_at_parameters(self, model: Model, kind: str, step: int, only: set[int] | None = None) -> None:
        for name, param in self._named(model):
            if only is None or id(param) in only:
                self._note((step, kind, name), param, param)

    def _look_at_states(self, model: Model, optimizers: Sequence[Any], step: int) -> None:
        names = {id(param): name for name, param in self._named(model)}
        for optimizer in optimizers:
            for param, state in getattr(optimizer, "state", {}).items():
                for key, value in state.items() if id(param) in names else ():
                    if isinstance(value, torch.Tensor):
                        name = names[id(param)]
                        self._note((step, "state", f"{key} of {name}"), param, value, name)

    def _note(self, key: tuple[int, str, str], param: Any, value: Any, follows: str = "") -> None:
        part = part_of_dtensor(value) if is_dtensor(value) else None
        local = None if value is None else copy_of_local(value)
        if local is not None and not local.dim() and key[1] == "state":
            part = Part(())
        self._looks[key] = TensorLook(local, part, self._declared(key[2], param), follows or key[2])


def clip_gradients(modules: Sequence[nn.Module], most: float) -> torch.Tensor:
    """Clip by the norm of all gradients, plain and DTensors; those of other stages are not counted."""
    gradients = [param.grad for module in modules for param in module.parameters() if param.grad is not None]
    norms: list[Any] = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    total: torch.Tensor = torch.stack([norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]).norm()
    for gradient in gradients:
        gradient.mul_((most / (total + 1e-6)).clamp(max=1.0).item())
    return total
