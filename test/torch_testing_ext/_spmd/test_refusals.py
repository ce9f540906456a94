"""What a compiled step cannot do right is refused on every rank, with the problem, the line and the remedy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from loops import Parallel, adam, error, net, update, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, Override, ParallelMode, SPMDError, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

BOTH = ("replicate", "fully_shard")


class Case:
    """What a row of the table has: its rank and style, and the state that must be as before after the error."""

    def __init__(self, rank: int, style: str) -> None:
        self.rank, self.style = rank, style
        self.trainings: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        torch.manual_seed(rank)

    def step(self, function: Callable[..., Any]) -> Any:
        return compile(parallel_mode=DataParallel(self.style))(function)

    def batch(self, call: int = 20) -> Any:
        return Parallel(self.rank).batch(call)

    def trained(self, function: Callable[..., Any] = update, calls: int = 2) -> Any:
        """A model and its optimizer after some calls of a step, and the step."""
        model = net()
        optimizer, step = adam(model), self.step(function)
        for call in range(calls):
            step(model, optimizer, self.batch(call))
        self.trainings.append((model, optimizer))
        return model, optimizer, step

    def state(self) -> Any:
        """All that a call may change, as the user sees it between calls, and the identity of parameters."""
        params = [param for model, _ in self.trainings for param in model.parameters()]
        grads = [None if param.grad is None else whole(param.grad) for param in params]
        states = [values for _, optimizer in self.trainings for values in optimizer.state.values()]
        values = [[whole(value) for value in each.values()] for each in states]
        return [whole(param) for param in params], grads, values, torch.get_rng_state(), [id(param) for param in params]


@dataclass(frozen=True)
class Refusal:
    """A row: a function that prepares a program and returns the call that is refused."""

    prepare: Callable[[Case], Callable[[], Any]]
    problem: str
    remedy: str
    line: str  # of the program; "" if the error is about all of it
    styles: tuple[str, ...]
    changes: bool  # the step has changed something before the error


REFUSALS: dict[str, Refusal] = {}


def refused(problem: str, remedy: str, *, line: str = "", styles: tuple[str, ...] = BOTH, changes: bool = False) -> Any:
    def register(prepare: Any) -> Any:
        REFUSALS[prepare.__name__] = Refusal(prepare, problem, remedy, line, styles, changes)
        return prepare

    return register


def first_call(case: Case, model: Any) -> Callable[[], Any]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if not nn.parameter.is_lazy(param)] or
                                [nn.Parameter(torch.ones(1))], lr=0.1)  # fmt: skip
    return lambda: case.step(update)(model, optimizer, case.batch())


# -- Models


@refused("is on the meta device", "Materialize the model")
def meta(case):
    with torch.device("meta"):
        model = net()
    return first_call(case, model)


@refused("is not initialized", "Run the lazy module once")
def lazy(case):
    return first_call(case, nn.Sequential(nn.LazyLinear(3)))


@refused("DistributedDataParallel: it would be averaged twice", "Pass the plain module")
def in_ddp(case):
    return first_call(case, nn.parallel.DistributedDataParallel(net()))


@refused("it would be averaged twice|is a DTensor", "Pass the plain module|Pass a plain module")
def in_fsdp(case):
    model = net()
    fully_shard(model)
    return first_call(case, model)


@refused("is a DTensor on DeviceMesh", "Pass a plain module")
def on_a_mesh_of_two_dimensions(case):
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(), 1)), net()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, mesh, [Shard(0), Replicate()]))
    return first_call(case, model)


@refused("is a DTensor on DeviceMesh", "Pass a plain module")
def sharded_by_columns(case):
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), net()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, mesh, [Shard(1)]))
    return first_call(case, model)


@refused("no model and no optimizer of the step", "Pass the model")
def model_that_is_too_deep(case):
    model = net()
    optimizer = adam(model)
    many = [(model, optimizer), *range(256)]
    case.trainings.append((model, optimizer))
    return lambda: case.step(lambda batch: update(*many[0], batch))(case.batch())


@refused("share memory", "Tie weights by the same Parameter", styles=("fully_shard",))
def sharing_memory(case):
    model = net(6, 3, 6, 3)
    model[2].weight = nn.Parameter(model[0].weight.data.t())
    return first_call(case, model)


@refused("share memory", "Tie weights by the same Parameter", styles=("fully_shard",))
def sharing_memory_with_a_buffer(case):
    model = net()
    model.register_buffer("flat", model[0].weight.data.view(-1))
    return first_call(case, model)


@refused("has parameter 0.weight, .* has parameter 0.weight", "Build the same model and optimizer")
def model_of_one_rank(case):
    return first_call(case, net(6, 7 + case.rank, 3))


@refused("has group 0 of SGD .* has group 0 of AdamW ", "Build the same model and optimizer")
def optimizer_of_one_rank(case):
    model = net()
    optimizer = adam(model) if case.rank else torch.optim.SGD(model.parameters(), lr=1)
    return lambda: case.step(update)(model, optimizer, case.batch())


@refused("rank 1 has 6", "Build and change the same model")
def layer_of_one_rank_in_a_later_call(case):
    model, optimizer, step = case.trained()
    if case.rank:
        model.append(nn.Linear(3, 3))
    return lambda: step(model, optimizer, case.batch())


@refused("by another compiled step", "Use the same parallel_style")
def another_style(case):
    model, optimizer, _ = case.trained()
    other = "fully_shard" if case.style == "replicate" else "replicate"
    return lambda: compile(parallel_mode=DataParallel(other))(update)(model, optimizer, case.batch())


# -- What a step does


@refused(r"create_graph=True\) leaves gradients with a graph", "autograd.grad", line="create_graph=True", changes=True)
def gradients_with_a_graph(case):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        error(model, batch).backward(create_graph=True)
        optimizer.step()

    model, optimizer, _ = case.trained()
    return lambda: case.step(step)(model, optimizer, case.batch())


@refused("gradients of .* are one tensor", "to a clone, or to None", line="backward()", changes=True)
def two_parameters_with_one_gradient(case):
    def step(model, optimizer, batch):
        model[0].bias.grad = model[1].bias.grad = torch.zeros(6)
        (model[1](model[0](batch[0]))).sum().backward()

    model = net(6, 6)
    model.append(nn.Linear(6, 6))
    return lambda: case.step(step)(model, torch.optim.SGD(model.parameters(), lr=0.1), case.batch())


@refused("calls itself", "Let it call the function that is not compiled", changes=True)
def step_that_calls_itself(case):
    step = case.step(lambda model, optimizer, batch: step(model, optimizer, batch))
    model = net()
    return lambda: step(model, adam(model), case.batch())


@refused("while another thread is in a call", "from one thread at a time", changes=True)
def another_thread(case):
    raised = []

    def in_thread(*args):
        try:
            compiled(*args)
        except SPMDError as problem:
            raised.append(problem)

    def step(*args):
        thread = threading.Thread(target=in_thread, args=args)
        thread.start()
        thread.join()
        raise raised[0]

    model, compiled = net(), case.step(step)
    return lambda: compiled(model, adam(model), case.batch())


# -- Ranks that differ


@refused("The parameters of rank 1 differ", "average", changes=True)
def updates_that_are_not_averaged(case):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        params = [*model.parameters()]
        for param, gradient in zip(params, torch.autograd.grad(error(model, batch), params), strict=True):
            param.grad = gradient
        optimizer.step()
        error(model, batch).backward()

    model = net()
    optimizer, compiled = adam(model), case.step(step)

    def call():
        for number in range(2):
            compiled(model, optimizer, case.batch(number))

    return call


@refused("The parameters of rank 1 differ", "average", changes=True)
def gradients_that_a_rank_changes(case):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        error(model, batch).backward()
        model[0].weight.grad[0, 0] *= 1 - 2 * case.rank
        optimizer.step()

    model = net()
    optimizer, compiled = adam(model), case.step(step)

    def call():
        for number in range(2):
            compiled(model, optimizer, case.batch(number))

    return call


@refused("The ranks do different things: rank 0 is", "on every rank", changes=True)
def another_backward(case):
    def step(model, optimizer, batch):
        for _ in range(backwards[case.rank]):
            error(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    backwards = [1, 1]
    model, optimizer, compiled = case.trained(step, calls=12)
    backwards[0] = 2

    def call():
        compiled(model, optimizer, case.batch())
        compiled(model, optimizer, case.batch())

    return call


@refused(
    "rank 0 is .* of step .*, rank 1 .* of step",
    "Call the same steps on every rank",
    changes=True,
)
def another_step(case):
    model, optimizer, step = case.trained()
    other = case.step(update)
    other(model, optimizer, case.batch())
    return lambda: (other if case.rank else step)(model, optimizer, case.batch())


@refused("different|rank", "on every rank", styles=("fully_shard",), changes=True)
def update_of_one_rank(case):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        error(model, batch).backward()
        if case.rank or every_rank:
            optimizer.step()

    every_rank = True
    model, optimizer, compiled = case.trained(step, calls=12)
    every_rank = False
    return lambda: compiled(model, optimizer, case.batch())


@refused(
    "or options or states of an optimizer",
    "with the same options",
    line="optimizer.step()",
    styles=("fully_shard",),
    changes=True,
)
def learning_rate_of_a_rank(case):
    """The loss of a rank decides about its learning rate."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = error(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step(-case.rank * next(numbers))

    model, numbers = net(), itertools.count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, compiled = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), case.step(step)

    def call():
        for number in range(4):
            compiled(model, optimizer, case.batch(number))

    return call


@refused("The parameters of rank 1 differ", "average", changes=True)
def updates_by_hand_that_are_not_averaged(case):
    def step(model, batch):
        params = [*model.parameters()]
        with torch.no_grad():
            for param, gradient in zip(params, gradients(model, batch), strict=True):
                param -= 0.1 * gradient

    def gradients(model, batch):
        with torch.enable_grad():
            return torch.autograd.grad(error(model, batch), [*model.parameters()])

    model = net()
    compiled = case.step(step)

    def call():
        for number in range(2):
            compiled(model, case.batch(number))

    return call


@refused("The parameters of rank 1 differ", "average", styles=("fully_shard",), changes=True)
def a_layer_that_a_rank_initializes_in_a_later_call(case):
    def step(model, batch, starts_again):
        for param in model.parameters():
            param.grad = None
        error(model, batch).backward()
        if starts_again:
            model[8].reset_parameters()

    model = net(6, 6, 6, 6, 6, 3)
    compiled = case.step(step)

    def call():
        for number in range(12):
            compiled(model, case.batch(number), number == 11)

    return call


def after(write, *, is_updated):
    """A call in which one rank writes to a large model, with Adam, before or after its update."""

    def prepare(case):
        def step(model, optimizer, batch, writes):
            optimizer.zero_grad()
            error(model, batch).backward()
            if not is_updated and writes:
                write(model, optimizer)
            optimizer.step()
            if is_updated and writes:
                write(model, optimizer)

        model = net(6, 400, 3)
        optimizer, compiled = adam(model), case.step(step)
        # All ranks read once, so that what they have is whole.
        compiled(model, optimizer, case.batch(), False)
        return lambda: compiled(model, optimizer, case.batch(), case.rank == 1)

    return prepare


def _one_element(model, optimizer):
    model[2].weight.data[2, 7] += 1


def _by_numpy(model, optimizer):
    model[0].weight.detach().numpy()[17, 1] = 3


def _two_rows(model, optimizer):
    weight = model[0].weight.data
    weight[[0, 100]] = weight[[100, 0]]


for _write in (_one_element, _by_numpy, _two_rows):
    for _is_updated in (False, True):
        REFUSALS[f"{'late' if _is_updated else 'early'}{_write.__name__}_of_one_rank"] = Refusal(
            after(_write, is_updated=_is_updated),
            "The parameters of rank 1 differ",
            "average",
            "",
            ("fully_shard",),
            True,
        )


@refused("or gradients or states", "average", styles=("fully_shard",), changes=True)
def gradients_that_one_rank_clears_after_its_update(case):
    def step(model, optimizer, batch, clears):
        error(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        if clears:
            model[0].weight.grad.zero_()

    model = net()
    optimizer, compiled = adam(model), case.step(step)
    compiled(model, optimizer, case.batch(), False)
    return lambda: compiled(model, optimizer, case.batch(), case.rank == 1)


@refused("or options or states of an optimizer", "every rank", styles=("fully_shard",), changes=True)
def states_that_one_rank_clears(case):
    model, optimizer, step = case.trained()
    if case.rank:
        optimizer.state.clear()
    return lambda: step(model, optimizer, case.batch())


@refused("or options or states of an optimizer", "every rank", styles=("fully_shard",), changes=True)
def a_moment_to_which_one_rank_writes(case):
    def step(model, optimizer, batch, writes):
        if writes:
            optimizer.state[model[0].weight]["exp_avg"].mul_(2)
        update(model, optimizer, batch)

    model = net()
    optimizer, compiled = adam(model), case.step(step)
    for _ in range(2):
        compiled(model, optimizer, case.batch(), False)
    return lambda: compiled(model, optimizer, case.batch(), case.rank == 1)


@refused("gradients of different parameters", "every rank", styles=("fully_shard",), changes=True)
def gradients_that_one_rank_clears_between_calls(case):
    model, optimizer, step = case.trained()
    if case.rank:
        optimizer.zero_grad()
    return lambda: step(model, optimizer, case.batch())


# -- Between calls


@refused("after the step had returned", "Call backward", styles=("fully_shard",), changes=True)
def backward_after_the_call(case):
    model = net()
    loss = case.step(error)(model, case.batch())
    return loss.backward


@refused("gradient hook between calls", "Register the hook before the first call", styles=("fully_shard",))
def hook_on_a_dtensor(case):
    model, optimizer, step = case.trained()
    next(model.parameters()).register_hook(lambda gradient: gradient * 0)
    return lambda: step(model, optimizer, case.batch())


@refused("of parameter 0.weight", "in the step", styles=("fully_shard",), changes=True)
def rows_that_the_program_keeps(case):
    model, optimizer, _ = case.trained()
    kept = [*model.parameters()]

    @case.step
    def step(batch):
        update(model, optimizer, batch)
        nn.utils.clip_grad_norm_(kept, 1)

    return lambda: step(case.batch())


@refused("of parameter 0.weight", "in the step", line="kept[0]", styles=("fully_shard",), changes=True)
def freezing_rows_that_the_program_keeps(case):
    model, optimizer, _ = case.trained()
    kept = [*model.parameters()]

    @case.step
    def step(batch):
        kept[0].requires_grad_(False)
        update(model, optimizer, batch)

    return lambda: step(case.batch())


@refused("draws random numbers", "in a step", line="normal_", styles=("fully_shard",), changes=True)
def random_numbers(case):
    model, _, _ = case.trained()
    return lambda: nn.init.normal_(model[0].weight)


@refused("draws random numbers", "in a step", line="randn_like", styles=("fully_shard",), changes=True)
def noise(case):
    model, _, _ = case.trained()
    return lambda: torch.randn_like(model[0].weight)


@refused("another .data", "copy_", line=".data =", styles=("fully_shard",), changes=True)
def another_data(case):
    model, _, _ = case.trained()

    def call():
        model[0].weight.data = torch.ones(7, 6)

    return call


class TestRefusals(DTensorContinuousTestBase):
    """The table, on two persistent ranks."""

    world_size = 2

    @parametrize("style", BOTH)
    @parametrize("name", [*REFUSALS])
    def test_refused(self, name, style):
        row = REFUSALS[name]
        if style not in row.styles:
            return
        case = Case(self.rank, style)
        call = row.prepare(case)
        before = case.state() if not row.changes else None
        with self.assertRaises(SPMDError) as caught:
            call()
        self.assertRegex(caught.exception.what, row.problem)
        self.assertRegex(caught.exception.remedy, row.remedy)
        if row.line:
            self.assertIn(row.line, caught.exception.where or "")
            self.assertIn("test_refusals.py", caught.exception.where)
        if before is not None:
            self.assertEqual(case.state(), before)
        case.trained()  # the ranks still agree, and train

    @parametrize("style", BOTH)
    @parametrize("calls", [2, 12])
    def test_a_rank_raises_its_own_error(self, style, calls):
        def step(model, optimizer, batch):
            if fails and self.rank:
                raise KeyError("mine")
            return update(model, optimizer, batch)

        fails = False
        case = Case(self.rank, style)
        model, optimizer, compiled = case.trained(step, calls)
        fails = True
        expected = (KeyError, "mine") if self.rank else (SPMDError, "raised an error on rank 1")
        with self.assertRaisesRegex(*expected):
            compiled(model, optimizer, case.batch())
        fails = False
        compiled(model, optimizer, case.batch())

    @parametrize("style", BOTH)
    @parametrize("calls", [2, 12])
    def test_a_rank_raises_an_error_at_the_end(self, style, calls):
        """All exchanges of the call are over, so that a replicated step on the other rank may succeed."""

        def step(model, optimizer, batch):
            update(model, optimizer, batch)
            if fails and self.rank:
                raise KeyError("mine")

        fails = False
        case = Case(self.rank, style)
        model, optimizer, compiled = case.trained(step, calls)
        fails = True
        raised = []
        for _ in range(2):
            try:
                compiled(model, optimizer, case.batch())
            except (KeyError, SPMDError) as error:
                raised.append(str(error))
            fails = False
        self.assertTrue(raised)
        self.assertRegex(
            raised[-1], "raised an error on rank [01]: see there" if raised[1:] or not self.rank else "mine"
        )
        for call in range(2):
            compiled(model, optimizer, case.batch(call))
        values = [None, None]
        dist.all_gather_object(values, [whole(param).tolist() for param in model.parameters()])
        self.assertEqual(*values)


class TestOptions(TestCase):
    """Words of PyTorch's compiler that have no meaning here, and those that are misspelled."""

    def test_refused(self):
        with self.assertRaisesRegex(SPMDError, "an Override has nothing to replace"):
            type("Mine", (Override,), {})
        for make, text in (
            (lambda: compile(gm_transformation=lambda graph: graph), "no graph for gm_transformation"),
            (lambda: compile(module_override=[object()]), "no graph for module_override"),
            (lambda: DataParallel(custom_passes=lambda graph: graph), "no graph for custom_passes"),
            (lambda: compile(backend="inductor"), "no backend 'inductor'"),
            (lambda: compile(parallel_mode=ParallelMode()), "Unknown parallel mode"),
            (lambda: DataParallel("sharded"), "Unknown parallel_style 'sharded'"),
            (lambda: DataParallel(bucket_mb=0), "bucket_mb is 0"),
            (lambda: DataParallel(input_batch_dim=-1), "input_batch_dim is -1"),
            (lambda: compile()(update)(), "no process group"),
        ):
            with self.assertRaisesRegex(SPMDError, text) as caught:
                make()
            self.assertGreater(len(caught.exception.remedy), 10)


instantiate_parametrized_tests(TestRefusals)

if __name__ == "__main__":
    run_tests()
