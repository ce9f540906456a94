"""What model and optimizer hold between calls, what a program may do with it, and how it appears in a step."""

import copy
import io
import itertools

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from loops import Parallel, Tied, adam, error, net, sgd, update, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._spmd import DataParallel, SPMDError, api, compile
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase

# Attributes of a tensor that look at no values. On one rank alone, they must not communicate.
HARMLESS = ("is_cpu", "is_nested", "is_sparse_csr", "is_mkldnn", "grad_dtype", "shape", "dtype", "is_leaf", "layout")


def sharded(step):
    return compile(parallel_mode=DataParallel("fully_shard"))(step)


class TestBetweenCalls(DTensorContinuousTestBase):
    """Models and optimizers after some calls, on two ranks."""

    world_size = 2

    def _trained(self, step=update, make=adam, model=None, calls=2, wrap=sharded):
        torch.manual_seed(self.rank)
        model = model or net()
        optimizer, compiled = make(model), wrap(step)
        for call in range(calls):
            compiled(model, optimizer, Parallel(self.rank).batch(call))
        return model, optimizer, compiled

    def test_everything_is_rows(self):
        model, optimizer, _ = self._trained()
        for name, param in model.named_parameters():
            self.assertIsInstance(param, nn.Parameter)
            for value in (param, param.grad, *(v for v in optimizer.state[param].values() if v.dim())):
                self.assertIsInstance(value, DTensor, name)
                self.assertEqual(value.placements, (Shard(0),), name)
                self.assertEqual(
                    len(value.to_local()), len(param.shape and torch.empty(param.shape).chunk(2)[self.rank])
                )

    def test_replicated_parameters_are_plain_or_as_pytorchs_compiler_has_them(self):
        model, _, _ = self._trained(wrap=compile())
        self.assertFalse(any(isinstance(param, DTensor) for param in model.parameters()))
        model, optimizer, step = self._trained(wrap=api.compile())
        self.assertTrue(all(param.placements == (Replicate(),) for param in model.parameters()))
        step(model, optimizer, Parallel(self.rank).batch(5))

    def test_whole_and_plain_in_a_step(self):
        kinds = []

        def step(model, optimizer, batch):
            update(model, optimizer, batch)
            kinds.extend(type(param) for param in model.parameters())
            kinds.extend(type(value) for values in optimizer.state.values() for value in values.values())
            self.assertEqual([tuple(param.shape) for param in model.parameters()], [(7, 6), (7,), (3, 7), (3,)])

        self._trained(step)
        self.assertNotIn(DTensor, kinds)
        self.assertIn(nn.Parameter, kinds)

    def test_the_same_rows_as_fsdp2(self):
        torch.manual_seed(0)
        mine, theirs = net(), net()
        theirs.load_state_dict(mine.state_dict())
        fully_shard(theirs)
        optimizers = adam(mine), adam(theirs)
        step = sharded(update)
        for call in range(3):
            batch = Parallel(self.rank).batch(call)
            self.assertEqual(step(mine, optimizers[0], batch), update(theirs, optimizers[1], batch))
        for param, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            self.assertEqual(param.placements, other.placements)
            self.assertEqual(param.to_local(), other.to_local())
        theirs.load_state_dict(mine.state_dict())

    def test_tied_weights_stay_tied(self):
        model, optimizer, _ = self._trained(model=Tied())
        self.assertIs(model.a.weight, model.b.weight)
        self.assertIs(optimizer.param_groups[0]["params"][0], model.a.weight)

    def test_the_objects_of_a_model_stay_the_same(self):
        model, optimizer, step = self._trained()
        before = [*model.parameters()]
        step(model, optimizer, Parallel(self.rank).batch(3))
        self.assertTrue(all(a is b for a, b in zip(before, model.parameters(), strict=True)))

    @parametrize("attribute", HARMLESS)
    def test_a_rank_alone_reads_an_attribute(self, attribute):
        model, optimizer, step = self._trained()
        if self.rank == 0:
            for param in model.parameters():
                getattr(param, attribute)
                getattr(param.grad, attribute)
        step(model, optimizer, Parallel(self.rank).batch(3))

    @parametrize("attribute", HARMLESS)
    def test_a_rank_alone_reads_an_attribute_in_a_step(self, attribute):
        def step(model, optimizer, batch):
            optimizer.zero_grad()
            error(model, batch).backward()
            if self.rank == 0:
                for param in model.parameters():
                    getattr(param, attribute)
                    getattr(param.grad, attribute)
            optimizer.step()

        self._trained(step)

    def test_checkpoints(self):
        model, optimizer, step = self._trained()
        saved, states = model.state_dict(), optimizer.state_dict()
        values = {name: value.full_tensor() for name, value in saved.items()}
        plain = net()
        plain.load_state_dict(values)
        self.assertEqual([*plain.parameters()], [whole(param) for param in model.parameters()])
        kept = copy.deepcopy((saved, states))
        step(model, optimizer, Parallel(self.rank).batch(3))
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        self.assertEqual([whole(param) for param in model.parameters()], [*values.values()])
        set_model_state_dict(
            model, {k: v * 2 for k, v in values.items()}, options=StateDictOptions(full_state_dict=True)
        )
        self.assertEqual([whole(param) for param in model.parameters()], [v * 2 for v in values.values()])
        step(model, optimizer, Parallel(self.rank).batch(4))

    @parametrize("style", ["replicate", "fully_shard"])
    def test_a_new_optimizer_goes_on_with_rows_of_a_checkpoint(self, style):
        model, optimizer, step = self._trained()
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        other = net()
        other.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
        resumed = adam(other)
        resumed.load_state_dict(torch.load(saved, weights_only=False))
        again = compile(parallel_mode=DataParallel(style))(update)
        for call in range(3, 6):
            step(model, optimizer, Parallel(self.rank).batch(call))
            again(other, resumed, Parallel(self.rank).batch(call))
            self.assertEqual([*map(whole, other.parameters())], [*map(whole, model.parameters())])

    def test_what_torch_cannot_do_it_refuses(self):
        model, optimizer, step = self._trained()
        x, y = Parallel(self.rank).batch(3)
        with self.assertRaisesRegex(RuntimeError, "mixed torch.Tensor and DTensor"):
            model(x)
        with self.assertRaisesRegex(RuntimeError, "mixed torch.Tensor and DTensor"):
            model[0].weight.detach().add_(torch.ones(7, 6))
        step(model, optimizer, (x, y))

    def test_a_parameter_of_before_is_its_dtensor_between_calls(self):
        torch.manual_seed(self.rank)
        model = net()
        before, pickled = [*model.parameters()], io.BytesIO()
        optimizer, step = sgd(model), sharded(update)
        step(model, optimizer, Parallel(self.rank).batch(0))
        with torch.no_grad():
            before[0].mul_(2)
            before[1].data.fill_(3)
        self.assertEqual(before[0].shape, (7, 6))
        before[2].requires_grad = False
        before[3].grad = None
        after = [*model.parameters()]
        for held, param in zip(before, after, strict=True):
            self.assertEqual(whole(held.detach()), whole(param))
            self.assertEqual(whole(copy.deepcopy(held)), whole(param))
            self.assertEqual(held.placements, (Shard(0),))
        self.assertEqual(whole(after[1]), torch.full((7,), 3.0))
        self.assertFalse(after[2].requires_grad)
        self.assertIsNone(after[3].grad)
        torch.save(before, pickled)
        pickled.seek(0)
        self.assertEqual([*map(whole, torch.load(pickled))], [*map(whole, after)])
        model[0].weight = before[0]
        step(model, torch.optim.SGD(before, lr=0.1), Parallel(self.rank).batch(1))
        self.assertEqual(whole(before[0].detach()), whole(model[0].weight))
        self.assertNotEqual(whole(before[0].detach()), whole(torch.ones(7, 6)))

    def test_a_plain_view_of_before(self):
        found = []
        for make in (lambda step: step, sharded):
            torch.manual_seed(0)
            model = net()
            model = nn.parallel.DistributedDataParallel(model) if make is not sharded else model
            inner = getattr(model, "module", model)
            flat, optimizer, step, seen = inner[0].weight.data.view(-1), sgd(model), make(update), []
            for call in range(3):
                step(model, optimizer, Parallel(self.rank).batch(call))
                seen.append(flat.clone())
                flat.mul_(0.5)
            step(model, optimizer, Parallel(self.rank).batch(3))
            with torch.no_grad():
                inner[0].weight.mul_(2)
            step(model, optimizer, Parallel(self.rank).batch(4))
            found.append((seen, flat, whole(inner[0].weight)))
        self.assertEqual(found[0], found[1])

    def test_another_dtype_keeps_hooks(self):
        torch.manual_seed(self.rank)
        model, reached = net(), []
        model[0].weight.register_hook(lambda gradient: reached.append(gradient.dtype))
        optimizer, step = sgd(model), sharded(update)
        step(model, optimizer, Parallel(self.rank).batch(0))
        model.double()
        step(model, optimizer, [value.double() for value in Parallel(self.rank).batch(1)])
        self.assertEqual(reached, [torch.float32, torch.float64])

    def test_attributes_of_a_parameter(self):
        torch.manual_seed(self.rank)
        model = net()
        before, seen = model[0].weight, []
        before.tag = "before"

        def step(model, optimizer, batch):
            seen.append((model[0].weight.tag, before.tag))
            update(model, optimizer, batch)
            model[0].weight.tag = "in a step"

        optimizer, compiled = sgd(model), sharded(step)
        for tagged in (before, model[0].weight):
            compiled(model, optimizer, Parallel(self.rank).batch(0))
            seen.append((model[0].weight.tag, before.tag))
            tagged.tag = "between"
            seen.append((model[0].weight.tag, before.tag))
        expected = ["before", "in a step", "between", "between", "in a step", "between"]
        self.assertEqual(seen, [(tag, tag) for tag in expected])

    @parametrize("how", ["deepcopy", "pickle"])
    def test_a_copied_model_trains(self, how):
        model, optimizer, step = self._trained(make=sgd)
        if how == "deepcopy":
            copied = copy.deepcopy(model)
        else:
            saved = io.BytesIO()
            torch.save(model, saved)
            saved.seek(0)
            copied = torch.load(saved, weights_only=False)
        other = sgd(copied)
        for call in range(3):
            for each, its in ((model, optimizer), (copied, other)):
                step(each, its, Parallel(self.rank).batch(call))
            params = [*map(whole, model.parameters())]
            self.assertEqual([*map(whole, copied.parameters())], params)

    def test_a_dtensor_of_the_program_keeps_its_gradient(self):
        def adding(model, optimizer, batch):
            error(model, batch).backward()
            optimizer.step()

        model, optimizer, step = self._trained(adding, make=sgd)
        weight = distribute_tensor(torch.ones(7, 6), model[0].weight.device_mesh, [Shard(0)])
        gradient = distribute_tensor(torch.full((7, 6), 2.0), weight.device_mesh, [Shard(0)])
        model[0].weight = nn.Parameter(weight)
        model[0].weight.grad = gradient
        optimizer.param_groups[0]["params"][0] = model[0].weight
        plain = net()
        plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        for param, other in zip(plain.parameters(), model.parameters(), strict=True):
            param.grad = whole(other.grad)
        plain = nn.parallel.DistributedDataParallel(plain)
        for each, its, call in ((model, optimizer, step), (plain, sgd(plain), adding)):
            call(each, its, Parallel(self.rank).batch(3))
        self.assertEqual([*map(whole, model.parameters())], [*plain.parameters()])

    def test_states_of_another_layout_are_updated(self):
        model, optimizer, step = self._trained()
        other, its, _ = self._trained()
        for values in its.state.values():
            values["exp_avg"] = values["exp_avg"].redistribute(placements=[Replicate()])
        self.assertEqual(its.state[other[0].weight]["exp_avg"].placements, (Replicate(),))
        for call in range(3, 5):
            for each, its_optimizer in ((model, optimizer), (other, its)):
                step(each, its_optimizer, Parallel(self.rank).batch(call))
        self.assertEqual([*map(whole, other.parameters())], [*map(whole, model.parameters())])

    def test_initialization_in_a_step(self):
        model, optimizer, step = self._trained()
        plain = torch.empty(7, 6)
        torch.manual_seed(5)
        nn.init.normal_(plain)
        torch.manual_seed(5)
        sharded(lambda model: nn.init.normal_(model[0].weight))(model)
        self.assertEqual(whole(model[0].weight), plain)
        step(model, optimizer, Parallel(self.rank).batch(3))

    def test_a_copy_in_place_of_a_view_is_refused_where_it_differs(self):
        model, optimizer, step = self._trained()
        weight = model[0].weight.detach()
        row, rows, part = weight[0], weight[1:3], weight.chunk(2)[1]
        self.assertEqual(whole(row), whole(weight)[0])
        for copied in (row, rows, part, weight.diagonal(), row[2:]):
            with self.assertRaisesRegex(SPMDError, r"copied(.|\n)*test_sharding.py:.*zero_(.|\n)*in a step"):
                copied.zero_()
        weight[:, 0].zero_()
        self.assertEqual(whole(weight)[:, 0], torch.zeros(7))
        with self.assertRaisesRegex(SPMDError, "has copied"):
            row.sum()
        row, row_of_state = weight[0], optimizer.state[model[0].weight]["exp_avg"][0]
        step(model, optimizer, Parallel(self.rank).batch(3))
        for copied in (row, row_of_state):
            with self.assertRaisesRegex(SPMDError, "has copied"):
                copied.sum()

    def test_a_part_of_a_sum_is_no_value(self):
        model, _, _ = self._trained()
        weight = model[0].weight
        reads = [lambda: weight.sum().item(), lambda: float(weight.grad.norm())]
        if (weight > 0).any().placements[0].is_replicate():  # from torch 2.15 on
            self.assertEqual(bool((weight > 0).any()), bool((whole(weight) > 0).any()))
        else:
            reads.append(lambda: bool((weight > 0).any()))
        for read in reads:
            with self.assertRaisesRegex(SPMDError, r"read(.|\n)*test_sharding.py(.|\n)*full_tensor\(\) first"):
                read()
        self.assertEqual(weight.sum().full_tensor().item(), whole(weight).sum().item())
        self.assertEqual(weight[3, 2].item(), whole(weight)[3, 2].item())
        norm = nn.utils.get_total_norm([whole(param.grad) for param in model.parameters()])
        self.assertEqual(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item(), norm.item())

    def test_a_mean_of_uneven_rows_is_right_or_refused(self):
        model, _, _ = self._trained(model=net(6, 7, 4, 3))
        even, uneven = model[2].weight, model[0].weight
        means = [
            torch.mean,
            lambda values: F.mse_loss(values, 2 * values),
            lambda values: F.huber_loss(values, -values),
        ]
        with torch.no_grad():
            for mean, weight in itertools.product(means, (even, uneven)):
                try:
                    found = whole(mean(weight))
                except SPMDError as refused:
                    # torch takes the mean of the ranks' means.
                    self.assertIs(weight, uneven)
                    self.assertRegex(str(refused), r"mean of each rank's rows(.|\n)*test_sharding.py")
                else:
                    self.assertEqual(found, mean(whole(weight)))

    def test_a_backward_outside_of_a_step_averages(self):
        model, optimizer, _ = self._trained(wrap=compile())
        optimizer.zero_grad()
        for value in (self.rank + 1.0, 2.0):
            (model[0].weight * value).sum().backward()
        self.assertEqual(model[0].weight.grad, torch.full((7, 6), 3.5))

    def test_distributed_checkpoint(self):
        model, optimizer, step = self._trained()
        saved = {"model": {name: value.detach().clone() for name, value in model.state_dict().items()}}
        self.assertTrue(all(isinstance(value, DTensor) for value in saved["model"].values()))
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(saved, is_coordinator=True)
        sizes = [item.tensor_data.size for item in planner.create_local_plan().items]
        self.assertEqual(sizes, [value.shape for value in saved["model"].values()])
        step(model, optimizer, Parallel(self.rank).batch(3))


class TestReads(DTensorContinuousTestBase):
    """A rank alone reads gradients, which are whole in a step."""

    world_size = 3

    @parametrize("place", ["before the update", "after the update", "both"])
    def test_one_rank_reads(self, place):
        found = []
        for reader in (0, None):
            norms = []

            def look(model, reader=reader, norms=norms):
                if reader in (self.rank, None):
                    norms.extend(param.grad.norm().item() for param in model.parameters())

            @sharded
            def step(model, optimizer, batch, look=look):
                optimizer.zero_grad()
                error(model, batch).backward()
                if place != "after the update":
                    look(model)
                optimizer.step()
                if place != "before the update":
                    look(model)

            torch.manual_seed(0)
            model = net()
            optimizer = adam(model)
            for call in range(3):
                step(model, optimizer, Parallel(self.rank).batch(call))
            found.append((norms, [whole(param) for param in model.parameters()]))
        self.assertEqual(found[0][1], found[1][1])
        self.assertEqual(found[0][0], found[1][0] if self.rank == 0 else [])


class TestCompiledModels(DTensorContinuousTestBase):
    """A model that torch.compile compiles trains in a step, with the numbers of the eager one."""

    world_size = 2

    @parametrize("style", ["replicate", "fully_shard"])
    @parametrize("is_compiled_before", [True, False])
    def test_trains_alike(self, style, is_compiled_before):
        found = []
        for backend in (None, "aot_eager"):
            torch.manual_seed(self.rank)
            model = net()
            optimizer = adam(model)
            if backend is not None and is_compiled_before:
                model.compile(backend=backend)
            called = torch.compile(model, backend=backend) if backend and not is_compiled_before else model

            @compile(parallel_mode=DataParallel(style))
            def step(batch, called=called, optimizer=optimizer):
                optimizer.zero_grad()
                loss = error(called, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(called.parameters(), 0.1)
                optimizer.step()
                return loss.detach()

            losses = [step(Parallel(self.rank).batch(call)) for call in range(4)]
            found.append((losses, [whole(param) for param in model.parameters()]))
        self.assertEqual(found[0], found[1])


instantiate_parametrized_tests(TestBetweenCalls)
instantiate_parametrized_tests(TestReads)
instantiate_parametrized_tests(TestCompiledModels)

if __name__ == "__main__":
    run_tests()
