"""Trainings under layouts: sound ones are silent, planted mistakes are told, and bad input is refused in a sentence."""

import contextlib

import layout_programs as programs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_testing_ext.common_distributed import RankError
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.layouts import LayoutError, check_layouts, layouts, tokens


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
        finding = caught.exception.reports[0].finding
        self.assertIsNotNone(finding, caught.exception)
        self.assertEqual(finding.name[: len(name)], name, caught.exception)
        self.assertIn((kind, axis), [(reason.kind, reason.axis) for reason in finding.reasons], caught.exception)
        return caught.exception

    @contextlib.contextmanager
    def refused(self, text, error=LayoutError):
        with self.assertRaises(error) as caught:
            yield
        self.assertIn(text, str(caught.exception))


def planted(function, *mistakes):
    return lambda layout: function(layout, *mistakes)


def by_hand(*mistakes):
    return planted(programs.train_by_hand, *mistakes)


# A training, its mistake, the layout that shows it, and what is told: tensor, kind, axis.
PLANTED = (
    (programs.train_by_hand, "unreduced input", "tp=2", "blocks.1.norm.bias", "missing_sum", "tp"),
    (programs.train_by_hand, "loss times tp", "tp=2", "loss", "times", "tp"),
    (programs.train_by_hand, "norm counts replicas", "tp=2", "norm", "norm", "tp"),
    (programs.train_by_hand, "local token counts", "dp=2", "loss", "weighted", ""),
    (programs.train_experts, "unreduced router", "tp=2", "moe.router.bias", "missing_sum", "tp"),
    (programs.train_experts, "experts times ep", "ep=2", "moe.experts.3.bias", "times", "ep"),
    (programs.train_sequence, "unreduced norm", "tp=2", "block.norm.bias", "missing_sum", "tp"),
    (programs.train_pipeline, "tied unreduced", "pp=2", "embedding.weight", "missing_sum", "pp"),
    (programs.train_by_hand, "unreduced dp", "dp=2", "head.bias", "missing_sum", "dp"),
    (programs.train_by_hand, "unreduced head", "dp=2", "head.weight", "missing_sum", "dp"),
    (programs.train_by_hand, "reduced copy", "dp=2", "head.weight", "missing_sum", "dp"),
    (programs.train_by_hand, "mean of means", "dp=2", "loss", "weighted", ""),
    (programs.train_by_hand, "local norm", "tp=2", "norm", "norm_local", "tp"),
    (programs.train_by_hand, "norm omits head", "tp=2", "norm", "norm_omits", ""),
    (programs.train_by_hand, "norm omits up", "tp=2", "norm", "norm_omits", ""),
    (programs.train_by_hand, "seeded by rank", "tp=2", "head.weight", "unlike", "tp"),
    (programs.train_by_hand, "scattered over another group", "tp=2", "blocks.0.up.weight", "uncovered", ""),
    (programs.train_by_hand, "offset dropped", "tp=2", "blocks.1.offset", "zero", ""),
    (programs.train_by_hand, "learning rate times dp", "dp=2", "embedding.weight", "update", ""),
    (programs.train_by_hand, "moments lost", "dp=2 -> dp=2", "the optimizer's state", "state_lost", ""),
    (programs.train_by_hand, "loaded by one rank", "dp=2 -> dp=2", "embedding.weight", "unlike", "dp"),
    (programs.train_by_hand, "mapping overwritten", "tp=2 -> single", "blocks.0.up.weight", "rows", ""),
    (programs.train_by_hand, "scheduler lost", "dp=2 -> dp=2", "embedding.weight", "update", ""),
    (programs.train_experts, "experts divided by ep", "ep=2", "moe.experts.3.bias", "divided", "ep"),
    (programs.train_experts, "auxiliary times ep", "ep=2", "balance", "times", "ep"),
    (programs.train_sequence, "loss divided by sp", "tp=2", "loss", "divided", "tp"),
    (programs.train_context, "loss times cp", "cp=2", "2.bias", "times", "cp"),
    (programs.train_pipeline, "tied twice", "pp=2", "embedding.weight", "times", "pp"),
    (programs.train_pipeline, "divided once more", "pp=2", "loss", "divided", "pp"),
    (programs.train_accumulating, "rescaled", "dp=2", "head.bias", "weighted", ""),
    (programs.train_accumulating, "not cleared", "dp=2", "head.bias", "stale", ""),
    (programs.train_with_own_loader, "a sample twice", "dp=2", "samples", "samples", "dp"),
    (programs.train_balanced, "balance divided by cp", "cp=2", "balance", "divided", "cp"),
    (programs.train_balanced, "balance divided by dp", "dp=2", "balance", "divided", "dp"),
    (programs.train_balanced, "only said", "dp=2", "balance", "divided", "dp"),
    (programs.train_balanced, "balance over tp", "dp=2 tp=2", "balance", "unlike", "dp"),
    (programs.train_experts_and_tensors, "experts without tp", "ep=2 tp=2", "moe.experts.3.bias", "missing_sum", "tp"),
    (programs.train_experts_and_tensors, "experts divided by tp", "ep=2 tp=2", "moe.experts.3.bias", "divided", "tp"),
    (programs.train_experts_and_tensors, "reduced over one group", "ep=2 tp=2", "moe.router.bias", "missing_sum", "ep"),
    (programs.train_dropping, "dropout alike", "tp=2", "call 0", "dropout_alike", "tp"),
)
# A mistake that no rule explains is told by where values first differ.
BY_MODULE = (
    (programs.train_by_hand, "unreduced output", "tp=2", "the output of blocks.0; after that of blocks.0.down"),
    (programs.train_context, "local attention", "cp=2", "the output of 1; after that of 1.v"),
    (programs.train_context, "labels shifted", "cp=2", "it is the loss, or what it is given beside the model's output"),
    (programs.train_vocabulary, "padding in the loss", "tp=2", "it is the loss, or what it is given beside"),
    (
        programs.train_exchanging,
        "norm before the exchange",
        "cp=2",
        "the gradient of the output of 1.mix; after that of 1,",
    ),
)


class PlantedMistakesTest(LayoutCase):
    @pytest.mark.slow
    def test_each(self):
        for function, mistake, *told in PLANTED:
            with self.subTest(mistake):
                self.told(planted(function, mistake), *told)
        in_full = planted(programs.train_balanced, "own balance", "in full")
        self.told(in_full, "dp=2", "balance", "times", "dp")
        dropout = planted(programs.train_by_hand, "dropout", "dropout unlike")
        self.told(dropout, "tp=2", "call 0", "dropout_unlike", "tp")

    @pytest.mark.slow
    def test_modules(self):
        for function, mistake, text, module in BY_MODULE:
            with self.subTest(mistake), self.refused(module):
                check_layouts(planted(function, mistake), text)

    def test_the_screen(self):
        error = self.told(by_hand("unreduced head"), "dp=2", "head.weight", "missing_sum", "dp")
        screen = error.failure.screen
        self.assertEqual(screen.splitlines()[0], "dp=2 does not train as single: the gradient of head.weight, step 0")
        self.assertIn("a reduction over dp is missing", " ".join(screen.split()).replace("- ", ""))
        self.assertIn("head.weight", error.account)
        self.assertEqual(error.reports[0].data()["tensor"], "head.weight")


def by_torch(parallelize, loads_first=True):
    return lambda layout: programs.train_torch(layout, parallelize, loads_first)


SOUND = (
    (
        by_hand(),
        "dp=2 tp=2",
        "tp=4",
        "tp=2 -> tp=2",
        "tp=2 -> dp=2",
        "dp=2 -> tp=2",
        "tp=2 -> single",
        "single -> tp=2",
    ),
    (by_hand("dropout"), "tp=2", "dp=2"),
    (planted(programs.train_experts), "tp=2", "ep=2", "ep=4"),
    (planted(programs.train_sequence), "tp=2"),
    (planted(programs.train_pipeline), "pp=2"),
    (planted(programs.train_accumulating), "dp=2"),
    (planted(programs.train_with_own_loader), "dp=2", "dp=4"),
    (planted(programs.train_vocabulary), "tp=2"),
    (planted(programs.train_experts_and_tensors), "ep=2", "tp=2", "ep=2 tp=2"),
    (planted(programs.train_dropping), "tp=2"),
    (planted(programs.train_balanced), "dp=2"),
    (planted(programs.train_balanced, "own balance"), "dp=2"),
    (by_torch(programs.ddp), "dp=2"),
    (by_torch(programs.fsdp2), "dp=2", "dp=4"),
    (by_torch(programs.fsdp2, False), "dp=2"),
    (by_torch(programs.tensor_parallel), "tp=2"),
    (by_torch(programs.tensor_parallel_and_fsdp2), "dp=2 tp=2"),
)


class SoundProgramsTest(LayoutCase):
    def test_by_hand(self):
        self.alike(by_hand(), "tp=2", "dp=2")

    @pytest.mark.slow
    def test_all(self):
        for seed in (1, 2):
            for train, *texts in SOUND:
                with self.subTest(texts=texts, seed=seed):
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


class RefusalsTest(LayoutCase):
    def test_texts(self):
        for text in ("tp2", "tp=0", "tp=2 tp=2", "", "=2", "tp=-1", "tp=2, dp=2", "single tp=2"):
            with self.subTest(text), self.refused(f"{text!r} is no layout: write 'single', or axes", ValueError):
                check_layouts(by_hand(), text)
        with self.refused("no layout is given", ValueError):
            check_layouts(by_hand())
        with self.refused("layouts have no argument sed", TypeError):
            check_layouts(by_hand(), "tp=2", sed=1)
        with self.refused("it must be one rank", ValueError):
            check_layouts(by_hand(), "tp=2", reference="tp=4")
        with self.refused("@layouts needs layouts", TypeError):
            layouts(by_hand())

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

        with self.refused("the reference has no parameter layers.", RankError):
            check_layouts(named, "tp=2")
        with self.refused(
            "weight is [2, 2] here and [4, 2] in the reference, and nothing says how it is cut", RankError
        ):
            check_layouts(shaped, "tp=2")

    def test_arrows(self):
        with self.refused("this layout saves and loads: call layout.checkpoint(save, load)", RankError):
            check_layouts(lambda layout: trains(ones(), layout), "single -> dp=2")
        with self.refused("nothing is trained after loading"):
            check_layouts(by_hand(), "single -> single", save_after=2)
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
        self.assertEqual(len(set(counted)), 4)
        self.assertTrue(all(counted))
        _, labels = tokens(50, 4, 12, empty=True)
        self.assertEqual((labels[2:] != -100).sum().item(), 0)


if __name__ == "__main__":
    run_tests()
