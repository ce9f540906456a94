"""Trainings under layouts: sound ones are silent, planted mistakes are told, and bad input is refused in a sentence."""

import contextlib
import functools
import itertools

import layout_programs as programs
import layout_tables as tables
import pytest
import torch
import torch.distributed as dist
from layout_tables import by_torch, planted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_testing_ext.common_distributed import RankError
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import Case
from torch_testing_ext.layouts import LayoutError, check_layouts, layouts, tokens
from torch_testing_ext.layouts.hypotheses import Reason
from torch_testing_ext.layouts.layout_checks import LayoutCheck, raise_unless_right
from torch_testing_ext.layouts.layout_failures import view_of_report
from torch_testing_ext.layouts.layout_findings import LayoutFinding, LayoutReport
from torch_testing_ext.layouts.layout_options import LayoutOptions


class LayoutCase(TestCase):
    def alike(self, train, *texts, **options):
        """Check that these layouts train alike, and that everything was compared. Returns their reports."""
        reports = check_layouts(train, *texts, **options)
        self.assertEqual([(report.layout, report.not_compared) for report in reports], [(text, {}) for text in texts])
        return reports

    def told(self, train, text, name, kind, axis, **options):
        """Check that a mistake is told by the start of a name, and by the kind and axis of a reason."""
        with self.assertRaises(LayoutError) as caught:
            check_layouts(train, text, **options)
        self.check_finding(caught.exception, name, kind, axis)
        return caught.exception

    def check_finding(self, error, name, kind, axis):
        finding = error.reports[0].finding
        self.assertIsNotNone(finding, error)
        self.assertEqual(finding.name[: len(name)], name, error)
        self.assertIn((kind, axis), [(reason.kind, reason.axis) for reason in finding.reasons], error)

    def check_words(self, error, text):
        # Lines of a screen are wrapped.
        self.assertIn(" ".join(text.split()), " ".join(str(error).split()))

    @contextlib.contextmanager
    def refused(self, text, error=LayoutError):
        with self.assertRaises(error) as caught:
            yield
        self.check_words(caught.exception, text)


def by_hand(*mistakes):
    return planted(programs.train_by_hand, *mistakes)


class PlantedMistakesTest(LayoutCase):
    def test_all_kinds_are_planted(self):
        numbers = {number for number, *_ in (*tables.PLANTED, *tables.BY_MODULE)}
        self.assertEqual(numbers, set(tables.KINDS))

    @pytest.mark.slow
    def test_each(self):
        self.check_table(tables.PLANTED, self.check_finding)

    @pytest.mark.nightly
    def test_variants(self):
        self.check_table(tables.VARIANTS, self.check_finding)

    @pytest.mark.nightly
    def test_modules(self):
        self.check_table(tables.BY_MODULE, self.check_words)

    def check_table(self, table, check):
        """Pass what each mistake raises to `check`. One reference serves all mistakes in a training."""
        for rows in tables.by_reference(table):
            with contextlib.closing(LayoutCheck([row[3] for row in rows], LayoutOptions())) as shared:
                for _, function, mistakes, text, *told in rows:
                    with self.subTest(mistakes=mistakes):
                        with self.assertRaises(LayoutError) as caught:
                            report = shared.report(planted(function, *mistakes), text, Case("train"))
                            raise_unless_right([report], Case("train"), "single")
                        check(caught.exception, *told)

    def test_the_screen(self):
        error = self.told(by_hand("unreduced head"), "dp=2", "head.weight", "missing_sum", "dp")
        screen = error.failure.screen
        self.assertEqual(screen.splitlines()[0], "dp=2 does not train as single: the gradient of head.weight, step 0")
        self.assertIn("a reduction over dp is missing", " ".join(screen.split()).replace("- ", ""))
        self.assertIn("head.weight", error.account)
        self.assertEqual(error.reports[0].data()["tensor"], "head.weight")

    def test_a_screen_with_little_room(self):
        """Reasons are not cut, and a remark is there as a whole or not at all."""
        reason = Reason("missing_sum", "tp", "ranks along tp have parts of the reference; " * 3 + "their sum is it")
        seen = set()
        for lines in (1, 4):
            note = f"begins {' '.join(['words'] * 14 * lines)} ends"
            finding = LayoutFinding(0, "grad", "head", [reason], shares={0: "had 0.5"}, notes=[note])
            for length in range(0, 400, 80):
                case = Case("train", show_command=f"show {'x' * length}")
                screen = view_of_report(LayoutReport("tp=2", finding), case, "single").screen
                with self.subTest(lines=lines, length=length):
                    self.assertIn("their sum is it", " ".join(screen.split()))
                    self.assertEqual("begins" in screen, "ends" in screen)
                    seen.add("begins" in screen)
        self.assertEqual(seen, {True, False})

    def test_the_name_of_a_partial_function(self):
        """Its arguments may be long, and are not what a command shows it by."""

        def fails(layout, text):
            raise KeyError("planted")

        with self.assertRaises(RankError) as caught:
            check_layouts(functools.partial(fails, text="x" * 200), "dp=2")
        self.assertRegex(caught.exception.failure.show_command, r"check_layouts\(.*fails\)'$")


class SoundProgramsTest(LayoutCase):
    def test_by_hand(self):
        self.alike(by_hand(), "tp=2", "dp=2")

    @pytest.mark.slow
    def test_all(self):
        for seed, (name, (train, *texts)) in zip(itertools.cycle((1, 2)), tables.BY_HAND.items(), strict=False):
            with self.subTest(name, seed=seed):
                self.alike(train, *texts, seed=seed)

    @pytest.mark.slow
    def test_context(self):
        """The samples are cut by positions, too, and are the only thing that is not compared."""
        for train in (programs.train_context, programs.train_balanced, programs.train_exchanging):
            (report,) = check_layouts(planted(train), "cp=2")
            self.assertEqual(list(report.not_compared), ["the samples"])

    @pytest.mark.slow
    def test_bfloat16(self):
        self.alike(by_torch(programs.ddp), "dp=2", dtypes=(torch.bfloat16,))

    @layouts("dp=2")
    def test_the_decorator(self, layout):
        programs.train_by_hand(layout)


def trains(parameter, layout, loss=lambda parameter, batch: (parameter * batch).sum(), lr=0.1):
    """A model of one parameter."""
    model = nn.ParameterList([nn.Parameter(parameter)])
    layout.load(model)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for batch in layout.batches(lambda step: torch.arange(8.0).reshape(4, 2) + step, steps=2):
        value = loss(model[0], batch)
        value.backward()
        layout.step(model, optimizer, value)


def ones():
    return torch.ones(2)


class Masked(nn.Linear):
    """A layer with a mask of attention, a value that is unset, and an index."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("unset", torch.tensor([torch.nan, 1.0]))
        self.register_buffer("index", torch.arange(2))

    def forward(self, batch):
        return torch.softmax(super().forward(batch)[:, None, :] + self.mask, -1) @ batch[:, :, None]


class Turned(nn.Linear):
    """A layer with complex weights, and ones without elements, of integers and that are frozen."""

    def __init__(self):
        super().__init__(2, 2)
        self.turn = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.codes = nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, batch):
        return torch.view_as_real(super().forward(batch).to(self.turn.dtype) @ self.turn) + self.empty.sum()


class Looked(nn.Sequential):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 2))

    def forward(self, batch):
        return super().forward(batch.long())


def trains_odd(make_model, layout, mistake=lambda model: None, pack=lambda tensor: tensor, take=lambda batch: batch):
    """A model over dp. `mistake`: in rank 1 after the backward. `take`: the samples of a packed batch."""
    model = layout.load(make_model())
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1)
    for batch in layout.batches(lambda step: pack(torch.arange(8.0).reshape(4, 2) % (3 + step)), steps=2):
        loss = model(take(batch)).square().mean()
        loss.backward()
        for param in model.parameters() if layout.size("dp") > 1 else ():
            if param.grad is not None and param.grad.numel():
                gradient = param.grad.to_dense()
                dist.all_reduce(gradient, group=layout.group("dp"))
                param.grad = gradient / layout.size("dp")
        if layout.place("dp"):
            mistake(model)
        layout.step(model, optimizer, loss)


class OddModelsTest(LayoutCase):
    """Models with values and types that are rare: nothing is told of sound ones, and mistakes in them are."""

    @pytest.mark.slow
    def test_sound(self):
        for make_model in (Masked, Turned, Looked):
            with self.subTest(make_model):
                self.alike(functools.partial(trains_odd, make_model), "dp=2")

    @pytest.mark.slow
    def test_low_precision(self):
        for make_model in (Masked, Turned):
            with self.subTest(make_model):
                self.alike(functools.partial(trains_odd, make_model), "dp=2", dtypes=(torch.bfloat16,))

    @pytest.mark.slow
    def test_values_that_are_infinite(self):
        def unmasks(model):
            model.mask[0, 0] = 0.5

        for dtype in (torch.float64, torch.bfloat16):
            with self.subTest(dtype):
                train = functools.partial(trains_odd, Masked, mistake=unmasks)
                self.told(train, "dp=2", "mask", "unlike", "dp", dtypes=(dtype,))

    @pytest.mark.slow
    def test_parts_that_are_imaginary(self):
        def doubles(model):
            model.turn.grad = torch.complex(model.turn.grad.real, 2 * model.turn.grad.imag)

        self.told(functools.partial(trains_odd, Turned, mistake=doubles), "dp=2", "turn", "unlike", "dp")

    def test_batches(self):
        for pack, take in (
            (lambda tensor: {"ids": tensor, "scale": 2.0, "mask": None}, lambda batch: batch["ids"] * batch["scale"]),
            (lambda tensor: [(3, tensor)], lambda batch: batch[0][1]),
        ):
            with self.subTest(pack("ids")):
                train = functools.partial(trains_odd, Masked, pack=pack, take=take)
                self.alike(train, "dp=2")
        with self.refused("there is no tensor of samples in the batch of step 0", RankError):
            check_layouts(functools.partial(trains_odd, Masked, pack=lambda tensor: 3), "dp=2")


class RefusalsTest(LayoutCase):
    def test_texts(self):
        for text in ("tp2", "tp=0", "tp=2 tp=2", "", "=2", "tp=-1", "tp=2, dp=2", "single tp=2"):
            with self.subTest(text), self.refused(f"{text!r} is no layout: write 'single', or axes", ValueError):
                check_layouts(by_hand(), text)
        with self.refused("'tp=2 ->' is no layout", ValueError):
            check_layouts(by_hand(), "tp=2 ->")
        for text in ("single", "tp=1"):
            with self.subTest(text), self.refused(f"{text!r} is one rank, as the reference is", ValueError):
                check_layouts(by_hand(), text)
        with self.refused("no layout is given", ValueError):
            check_layouts(by_hand())
        with self.refused("layouts have no argument sed", TypeError):
            check_layouts(by_hand(), "tp=2", sed=1)
        with self.refused("it must be one rank", ValueError):
            check_layouts(by_hand(), "tp=2", reference="tp=4")
        with self.refused("@layouts needs layouts", TypeError):
            layouts(by_hand())
        with self.refused("needs a function of a layout, and not 3", TypeError):
            check_layouts(3, "tp=2")

        def test_it(self):
            pass

        with self.refused("test_it(self) has no argument layout, which @layouts passes", TypeError):
            layouts("tp=2")(test_it)

    @pytest.mark.slow
    def test_the_reference(self):
        for text, train in (
            ("all gradients are zero", lambda layout: trains(ones(), layout, lambda p, batch: (p * batch * 0).sum())),
            ("no parameter moves", lambda layout: trains(ones(), layout, lr=0.0)),
            (
                "its loss is the same",
                lambda layout: trains(
                    ones(),
                    layout,
                    lambda p, _: (p * 0.0 + p.detach()).sum() * 0 + p.sum() * 0 + (p - p.detach()).sum() + 1,
                ),
            ),
            (
                "gradients are not finite: 0",
                lambda layout: trains(ones(), layout, lambda p, _: (p * float("nan")).sum()),
            ),
            ("records no gradients", lambda layout: layout.load(nn.Linear(2, 2)) and None),
            ("draws random numbers", lambda layout: trains(ones(), layout, lambda p, b: (p * torch.rand(2)).sum())),
        ):
            with self.subTest(text), self.refused(text):
                check_layouts(train, "dp=2")

    @pytest.mark.slow
    def test_layouts_that_say_nothing(self):
        with self.refused("pp=2 cuts nothing: its ranks have the same samples and the same parameters"):
            check_layouts(by_hand(), "pp=2")
        with self.refused("dp=3: all 3 ranks raised ValueError: 4 samples do not divide over dp=3", RankError):
            check_layouts(by_hand(), "dp=3")
        with self.refused("6 positions do not divide over cp=4", RankError):
            check_layouts(planted(programs.train_context), "cp=4")

    def test_options(self):
        for text, options in (
            ("strict is 1", {"strict": 1}),
            ("dtypes is ()", {"dtypes": ()}),
            ("data is 'dp cp'", {"data": "dp cp"}),
            ("timeout is -1", {"timeout": -1}),
        ):
            with self.subTest(text), self.refused(text, ValueError):
                check_layouts(by_hand(), "tp=2", **options)
        with self.refused("the layout is 'tp=2000'; at most 1024 are possible", ValueError):
            check_layouts(by_hand(), "tp=2000")
        with self.refused("'tp=2' is given twice", ValueError):
            check_layouts(by_hand(), "tp=2", "dp=2", "tp=2")

    @pytest.mark.slow
    def test_meshes(self):
        def uses(sizes, names):
            def train(layout):
                if layout.size("tp") > 1:
                    dist.init_process_group("gloo")
                    layout.use(init_device_mesh("cpu", sizes, mesh_dim_names=names))
                programs.train_by_hand(layout)

            return train

        with self.refused("the mesh has 1 ranks along tp, the layout 2", RankError):
            check_layouts(uses((2, 1), ("dp", "tp")), "tp=2")
        with self.refused("the mesh has no dimension tp; it has dp, cp", RankError):
            check_layouts(uses((2, 1), ("dp", "cp")), "tp=2")

    @pytest.mark.slow
    def test_a_mesh_in_another_order(self):
        """The program's own mesh has the axes the other way round, and says so."""

        def train(layout):
            if layout.size("dp") > 1:
                dist.init_process_group("gloo")
                layout.own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
                layout.use(layout.own)
                layout.group = lambda axis: layout.own[axis].get_group()
            programs.train_by_hand(layout)

        self.alike(train, "dp=2 tp=2")

    def test_numbers_of_steps(self):
        def stops(layout):
            programs.STEPS = 2 if layout.size("dp") == 1 else 1
            programs.train_by_hand(layout)

        with self.refused("dp=2 stopped after step 0, the reference after step 1"):
            check_layouts(stops, "dp=2")

    def test_ranks_that_fail(self):
        def fails(layout):
            if layout.place("dp"):
                raise KeyError("planted")
            programs.train_by_hand(layout)

        with self.refused("dp=2: rank 1 of 2 raised KeyError: 'planted'", RankError):
            check_layouts(fails, "dp=2")

    @pytest.mark.slow
    def test_strict(self):
        def unsaid(layout):
            layout.record(**({"speed": 1.0} if layout.size("dp") > 1 else {}))
            programs.train_by_hand(layout)

        (report,) = check_layouts(unsaid, "dp=2")
        self.assertEqual(report.not_compared, {"speed": "the reference has not recorded it"})
        with self.refused("dp=2: speed is not compared: the reference has not recorded it"):
            check_layouts(unsaid, "dp=2", strict=True)

    def test_parameters(self):
        def named(layout):
            model = nn.ModuleDict({"layer" if layout.size("tp") == 1 else "layers": nn.Linear(2, 2)})
            layout.load(model)
            trains(ones(), layout)

        def shaped(layout):
            model = nn.Linear(2, 4 // layout.size("tp"))
            layout.load(model)
            (model(torch.ones(1, 2)).sum()).backward()
            layout.step(model, torch.optim.SGD(model.parameters(), 0.1))

        told = "the reference has no parameter layers.weight; the nearest is layer.weight: give load(name=...)"
        with self.refused(told, RankError):
            check_layouts(named, "tp=2")
        unsaid = "weight is [2, 2] here and [4, 2] in the reference, and nothing says how it is cut"
        for told in (unsaid, "load before cutting it, or write layout.dims['weight'] = 'tp .'"):
            with self.subTest(told), self.refused(told, RankError):
                check_layouts(shaped, "tp=2")

    def test_nothing_compared(self):
        def stays_away(layout):
            if layout.size("dp") == 1:
                programs.train_by_hand(layout)

        with self.refused("dp=2: nothing could be compared: call layout.step, or layout.watch"):
            check_layouts(stays_away, "dp=2")

    def test_weights_that_are_not_generic(self):
        """At zero, a square has no gradient. Its weight is moved, unless the test says that it must not be."""

        def train(layout):
            trains(torch.zeros(2), layout, lambda parameter, batch: (parameter**2 * batch).sum())

        self.told(train, "dp=2", "0", "missing_sum", "dp")
        with self.refused("the reference does not train: all gradients are zero"):
            check_layouts(train, "dp=2", generic=False)

    def test_arrows(self):
        with self.refused(
            "'single -> dp=2' saves and loads: call layout.checkpoint(save, load) before the first step", RankError
        ):
            check_layouts(lambda layout: trains(ones(), layout), "single -> dp=2")
        told = "'single -> single': nothing is trained after loading: train more than save_after=2 steps"
        with self.refused(told):
            check_layouts(by_hand(), "single -> single", save_after=2)

        def goes_on(layout):
            layout.checkpoint(lambda folder: None, lambda folder: None)
            programs.train_with_own_loader(layout)

        told = (
            "trained 2 steps, and saves after 1: take its steps from layout.batches, or stop it after layout.steps(2)"
        )
        with self.refused(told, RankError):
            check_layouts(goes_on, "dp=2 -> dp=2")
        with self.refused("has 2 arrows", ValueError):
            check_layouts(by_hand(), "tp=2 -> dp=2 -> tp=2")


@pytest.mark.layouts("dp=2", "tp=2")
def test_the_mark(layout, tmp_path):
    """Fixtures of the test are those of pytest's process."""
    assert tmp_path.is_dir()
    programs.train_by_hand(layout)


class TokensTest(TestCase):
    def test_rows_are_uneven(self):
        torch.manual_seed(0)
        ids, labels = tokens(50, 4, 12)
        counted = (labels != -100).sum(1).tolist()
        self.assertEqual(ids.shape, (4, 12))
        self.assertGreaterEqual(len(set(counted)), 3)
        self.assertTrue(all(counted))
        in_batches = {(tokens(50, 4, 12)[1] != -100).sum().item() for _ in range(20)}
        self.assertEqual(len(in_batches), 5)
        _, labels = tokens(50, 4, 12, empty=True)
        self.assertEqual((labels[2:] != -100).sum().item(), 0)


if __name__ == "__main__":
    run_tests()
