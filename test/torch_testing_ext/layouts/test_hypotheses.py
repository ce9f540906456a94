"""The table of hypotheses, without ranks: each kind, those that fit together, and values that none explains."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.layouts.hypotheses import Hypotheses
from torch_testing_ext.layouts.layout_text import places_of
from torch_testing_ext.layouts.norm_hypotheses import reasons_for_norm
from torch_testing_ext.layouts.tensor_parts import Part, whole_part

WHOLE = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3).sin()
ROWS = ([0, 1], [2, 3])


def hypotheses(microbatches=1, **axes):
    ranks = range(torch.tensor(list(axes.values())).prod())
    return Hypotheses(axes, {rank: places_of(rank, axes) for rank in ranks}, microbatches)


def whole_of(*values):
    """Ranks that all should have the whole tensor."""
    return {rank: (value, whole_part(value)) for rank, value in enumerate(values)}


def rows_of(*values):
    """Two ranks, each with half of the rows."""
    return {rank: (value, Part((torch.tensor(ROWS[rank]), None))) for rank, value in enumerate(values)}


TOP, BOTTOM = WHOLE[:2], WHOLE[2:]
NAN = WHOLE.clone()
NAN[0, 0] = float("nan")
# The last elements, and the first ones, are of a tensor beside it.
LATE, EARLY = (
    torch.cat(pair).view(4, 3) for pair in ((WHOLE.flatten()[2:], torch.ones(2)), (torch.ones(5), WHOLE.flatten()[:-5]))
)
# What ranks hold, and the kinds and axes of the reasons.
ONE_AXIS = (
    ("right", whole_of(WHOLE, WHOLE), []),
    ("zero", whole_of(WHOLE * 0, WHOLE * 0), [("zero", "")]),
    ("zero on a rank", whole_of(WHOLE, WHOLE * 0), [("zero", "tp")]),
    ("not finite", whole_of(WHOLE, NAN), [("not_finite", "tp")]),
    ("twice", whole_of(2 * WHOLE, 2 * WHOLE), [("times", "tp")]),
    ("half", whole_of(WHOLE / 2, WHOLE / 2), [("divided", "tp")]),
    ("four times", whole_of(4 * WHOLE, 4 * WHOLE), [("squared", "tp")]),
    ("a quarter", whole_of(WHOLE / 4, WHOLE / 4), [("squared", "tp")]),
    ("root", whole_of(2**0.5 * WHOLE, 2**0.5 * WHOLE), [("sqrt", "tp")]),
    ("sign", whole_of(-WHOLE, -WHOLE), [("sign", "")]),
    ("scaled", whole_of(1.7 * WHOLE, 1.7 * WHOLE), [("scaled", "")]),
    ("shares", whole_of(0.3 * WHOLE, 0.7 * WHOLE), [("missing_sum", "tp")]),
    ("parts of a sum", whole_of(WHOLE.cos(), WHOLE - WHOLE.cos()), [("missing_sum", "tp")]),
    ("parts of a mean", whole_of(WHOLE + WHOLE.cos(), WHOLE - WHOLE.cos()), [("missing_mean", "tp")]),
    ("parts of a multiple", whole_of(WHOLE.cos(), 3 * WHOLE - WHOLE.cos()), [("missing_scaled", "tp")]),
    ("right on one", whole_of(WHOLE, WHOLE.cos()), [("unlike", "tp")]),
    ("none", whole_of(WHOLE.cos(), WHOLE.exp()), [("unlike", "tp")]),
    ("none, but alike", whole_of(WHOLE.cos(), WHOLE.cos()), []),
    ("other parts", rows_of(BOTTOM, TOP), [("other_part", "tp")]),
    ("one part twice", rows_of(TOP, TOP), [("other_part", "tp")]),
    ("sum of parts", rows_of(TOP + BOTTOM, TOP + BOTTOM), [("parts_reduced", "tp")]),
    ("mean of parts", rows_of((TOP + BOTTOM) / 2, (TOP + BOTTOM) / 2), [("parts_reduced", "tp")]),
    ("twice the parts", rows_of(2 * TOP, 2 * BOTTOM), [("times", "tp")]),
    ("none, of rows", rows_of(TOP.cos(), BOTTOM.exp()), []),
    ("shifted", whole_of(WHOLE.roll(1, 0), WHOLE.roll(1, 0)), [("shifted", "")]),
    ("reversed", whole_of(WHOLE.flip(1), WHOLE.flip(1)), [("reversed", "")]),
    ("rows", whole_of(WHOLE[[0, 2, 1, 3]], WHOLE[[0, 2, 1, 3]]), [("rows", "")]),
    ("columns", whole_of(WHOLE[:, [1, 0, 2]], WHOLE[:, [1, 0, 2]]), [("columns", "")]),
    ("from a later element on", whole_of(LATE, LATE), [("displaced", "")]),
    ("from an earlier element on", whole_of(EARLY, EARLY), [("displaced", "")]),
)
SQUARE = torch.arange(1.0, 10.0, dtype=torch.float64).reshape(3, 3).sin()


class HypothesesTest(TestCase):
    def test_one_axis(self):
        for name, held, kinds in ONE_AXIS:
            with self.subTest(name):
                whole = WHOLE
                found = hypotheses(tp=2).of_tensor(whole, held)
                self.assertEqual([(reason.kind, reason.axis) for reason in found], kinds)

    def test_two_axes(self):
        """Axes of one size cannot be told apart by a factor; of a sum, the axis is known."""
        two = hypotheses(dp=2, tp=2)
        twice = two.of_tensor(WHOLE, whole_of(*[2 * WHOLE] * 4))
        self.assertEqual({(reason.kind, reason.axis) for reason in twice}, {("times", "dp"), ("times", "tp")})
        a, b = WHOLE.cos(), WHOLE - WHOLE.cos()
        self.assertEqual(two.of_tensor(WHOLE, whole_of(a, b, a, b))[0].axis, "tp")
        self.assertEqual(two.of_tensor(WHOLE, whole_of(a, a, b, b))[0].axis, "dp")
        quarters = (a / 2, b / 3, a / 2, 2 * b / 3)
        self.assertEqual(two.of_tensor(WHOLE, whole_of(*quarters))[0].axis, "dp tp")
        three = hypotheses(dp=3, tp=2).of_tensor(WHOLE, whole_of(*[3 * WHOLE] * 6))
        self.assertEqual([(reason.kind, reason.axis) for reason in three], [("times", "dp")])

    def test_ranks_with_one_part(self):
        """With more ranks than heads, some hold the same one."""
        shares = (TOP.cos(), TOP - TOP.cos(), BOTTOM.exp(), BOTTOM - BOTTOM.exp())
        held = {rank: (share, Part((torch.tensor(ROWS[rank // 2]), None))) for rank, share in enumerate(shares)}
        (reason,) = hypotheses(tp=4).of_tensor(WHOLE, held)
        self.assertEqual((reason.kind, reason.axis), ("missing_sum", "tp"))
        self.assertIn("among ranks with the same part", reason.text)
        held[3] = TOP, held[3][1]
        self.assertEqual([reason.kind for reason in hypotheses(tp=4).of_tensor(WHOLE, held)], ["unlike"])

    def test_steps(self):
        counts = [torch.tensor(float(count)) for count in (3, 2)]
        (reason,) = hypotheses(tp=2).of_steps(counts[1], whole_of(*counts))
        self.assertEqual((reason.kind, reason.axis), ("steps", "tp"))
        self.assertIn("3 (ranks 0) and 2 (ranks 1) steps, and 2 in the reference", reason.text)

    def test_microbatches(self):
        found = hypotheses(microbatches=4, pp=2).of_tensor(WHOLE, whole_of(*[4 * WHOLE] * 2))
        self.assertEqual([(reason.kind, reason.axis) for reason in found], [("times", "microbatches")])

    def test_padding_and_small_parts(self):
        padded = Part((torch.tensor([2, 3, -1]), None))
        first = Part((torch.tensor([0, 1, -1]), None))
        held = {0: (2 * first.of(WHOLE), first), 1: (2 * padded.of(WHOLE), padded)}
        self.assertEqual([reason.kind for reason in hypotheses(tp=2).of_tensor(WHOLE, held)], ["times"])
        one = torch.tensor([0.5], dtype=torch.float64)
        self.assertEqual([r.kind for r in hypotheses(tp=2).of_tensor(one, whole_of(2 * one, 2 * one))], ["times"])
        nothing = torch.zeros(3, dtype=torch.float64)
        self.assertEqual(hypotheses(tp=2).of_tensor(nothing, whole_of(nothing + 1, nothing + 1)), [])

    def test_other_tensors(self):
        one = hypotheses(tp=2)
        wholes = {"a": WHOLE, "b": WHOLE.cos()}
        self.assertEqual(
            one.of_others("a", wholes, whole_of(WHOLE.cos(), WHOLE.cos()))[0].text, "is b of the reference"
        )
        beside = torch.cat([WHOLE.flatten()[5:], WHOLE.cos().flatten()[:5]]).view(4, 3)
        (reason,) = one.of_pieces(wholes, whole_of(beside, beside))
        self.assertIn("has the elements of a from 5 on and b from 0 on", reason.text)
        self.assertEqual(one.of_pieces(wholes, whole_of(beside, WHOLE)), [])
        self.assertEqual(one.of_pieces(wholes, whole_of(WHOLE.exp(), WHOLE.exp())), [])
        self.assertEqual(one.of_earlier(WHOLE, WHOLE.cos(), whole_of(WHOLE + WHOLE.cos()))[0].kind, "stale")
        self.assertEqual(
            one.of_update(WHOLE, WHOLE.cos(), whole_of(WHOLE + 2 * (WHOLE.cos() - WHOLE)))[0].kind, "update"
        )
        self.assertEqual(one.of_update(WHOLE, WHOLE.cos(), whole_of(WHOLE.exp())), [])
        self.assertEqual(
            [reason.kind for reason in one.of_tensor(SQUARE, whole_of(SQUARE.t(), SQUARE.t()))], ["transposed"]
        )

    def test_updates(self):
        """What a step adds: nothing, a multiple, and a multiple of the parameter besides."""
        after = WHOLE + 0.1 * WHOLE.cos()
        for name, have, kinds, words in (
            ("lost", WHOLE, ["update"], "does not change it"),
            ("twice", WHOLE + 0.2 * WHOLE.cos(), ["update"], "2 times that of the reference"),
            ("decay", after - 0.01 * WHOLE, ["decay"], "-0.01 times the parameter itself"),
            ("another", after + 0.01 * WHOLE.exp(), [], ""),
        ):
            with self.subTest(name):
                found = hypotheses(tp=2).of_update(WHOLE, after, whole_of(have, have))
                self.assertEqual([reason.kind for reason in found], kinds)
                self.assertIn(words, " ".join(reason.text for reason in found))
        for name, of_ranks, kind, words in (
            ("one decays it", (after - 0.01 * WHOLE, after), "decay", "-0.01 (ranks 0) and 0 (ranks 1) times"),
            ("one steps twice", (after, WHOLE + 0.2 * WHOLE.cos()), "update", "1 (ranks 0) and 2 (ranks 1) times"),
            ("one does not send", (after, WHOLE), "update", "1 (ranks 0) and 0 (ranks 1) times"),
        ):
            with self.subTest(name):
                (reason,) = hypotheses(tp=2).of_update(WHOLE, after, whole_of(*of_ranks))
                self.assertEqual((reason.kind, reason.axis, words in reason.text), (kind, "tp", True))
        thrice = whole_of(*[WHOLE + 0.3 * WHOLE.cos()] * 6)
        self.assertEqual([reason.axis for reason in hypotheses(dp=3, tp=2).of_update(WHOLE, after, thrice)], ["dp"])
        # After loading it may as well be the step of a scheduler.
        resumed = hypotheses(dp=3, tp=2).of_update(WHOLE, after, thrice, is_resumed=True)
        self.assertEqual(resumed[0].axis, "")
        # Each rank's value of one element is a multiple.
        one, two = torch.ones(1), 2 * torch.ones(1)
        self.assertEqual(hypotheses(tp=2).of_update(one, two, whole_of(1.7 * one, 1.9 * one)), [])

    def test_what_is_no_displacement(self):
        """Equal elements are at each place, and most of the tensor must be there."""
        same = torch.full((6,), 0.5, dtype=torch.float64)
        but_last = torch.cat([same[:-1], torch.ones(1)])
        self.assertEqual(hypotheses(tp=2).of_tensor(same, whole_of(but_last, but_last)), [])
        little = torch.cat([WHOLE.flatten()[-5:], torch.ones(7)]).view(4, 3)
        self.assertEqual(hypotheses(tp=2).of_tensor(WHOLE, whole_of(little, little)), [])

    def test_padding(self):
        """A mean over labels of which some do not count."""
        one = hypotheses(dp=2)
        one.labels = (5, 12)
        for factor, words in ((5 / 12, "is 5/12 of"), (12 / 5, "is 1/(5/12) of")):
            (reason,) = one.of_tensor(WHOLE, whole_of(factor * WHOLE, factor * WHOLE))
            self.assertEqual((reason.kind, words in reason.text), ("padding", True))
        self.assertEqual([r.kind for r in one.of_number(3.0, {0: 0.5, 1: 0.75})], ["padding"])
        self.assertEqual([r.kind for r in one.of_number(3.0, {0: 0.5, 1: 2.0})], ["padding"])
        one.labels = (12, 12)
        self.assertEqual([r.kind for r in one.of_tensor(WHOLE, whole_of(*[5 / 12 * WHOLE] * 2))], ["scaled"])

    def test_numbers(self):
        """Every number is a multiple of another, so only exact ones are said."""
        one = hypotheses(tp=2)
        self.assertEqual([reason.kind for reason in one.of_number(3.0, {0: 6.0, 1: 6.0})], ["times"])
        self.assertEqual([reason.kind for reason in one.of_number(3.0, {0: 1.0, 1: 2.0})], ["missing_sum"])
        self.assertEqual(one.of_number(3.0, {0: 5.0, 1: 5.0}), [])
        self.assertEqual([reason.axis for reason in one.of_number(3.0, {0: 2.0, 1: 4.0})], ["tp"])

    def test_norms(self):
        one = hypotheses(tp=2)
        wholes = {"cut": WHOLE, "blocks.0.whole": WHOLE.cos(), "blocks.1.whole": WHOLE.exp()}
        halves = {rank: (part.of(WHOLE), part) for rank, (_, part) in rows_of(TOP, BOTTOM).items()}
        rest = {name: whole_of(wholes[name], wholes[name]) for name in list(wholes)[1:]}
        held = {"cut": halves, **rest}
        square = {name: float((whole**2).sum()) for name, whole in wholes.items()}
        total, rest_of = sum(square.values()), square["blocks.0.whole"] + square["blocks.1.whole"]
        own = [float((part.of(WHOLE) ** 2).sum()) + rest_of for _, part in halves.values()]
        for name, squares, kind in (
            ("counts replicas", [total + rest_of] * 2, "norm"),
            ("is local", own, "norm_local"),
            ("omits one", [total - square["blocks.0.whole"]] * 2, "norm_omits"),
            ("omits one of all layers", [rest_of and square["cut"]] * 2, "norm_omits"),
            ("has one twice", [total + square["cut"]] * 2, "norm_twice"),
            ("adds norms", [sum(each**0.5 for each in own) ** 2] * 2, "operation"),
            ("is the largest", [max(own)] * 2, "operation"),
        ):
            with self.subTest(name):
                ratios = {rank: (each / total) ** 0.5 for rank, each in enumerate(squares)}
                found = reasons_for_norm(one, wholes, held, ratios)
                self.assertIn(kind, [reason.kind for reason in found])
        self.assertEqual(reasons_for_norm(one, wholes, held, {0: 1.234, 1: 1.234}), [])

    def test_a_norm_of_two_axes(self):
        """It is summed over one of the axes that cut parameters; the axis that repeats them is not said."""
        held = {rank: (part.of(WHOLE), part) for rank, (_, part) in rows_of(TOP, BOTTOM).items()}
        every = {rank: held[rank % 2] for rank in range(4)}
        total = float((WHOLE**2).sum())
        ratios = {rank: (float((local**2).sum()) / total) ** 0.5 for rank, (local, _) in every.items()}
        found = reasons_for_norm(hypotheses(dp=2, tp=2), {"cut": WHOLE}, {"cut": every}, ratios)
        self.assertEqual([(reason.kind, reason.axis) for reason in found], [("norm_local", "tp")])
        quarters = {rank: (WHOLE[[rank]], Part((torch.tensor([rank]), None))) for rank in range(4)}
        over_tp = {rank: float((WHOLE[rank // 2 * 2 : rank // 2 * 2 + 2] ** 2).sum()) for rank in range(4)}
        ratios = {rank: (square / total) ** 0.5 for rank, square in over_tp.items()}
        found = reasons_for_norm(hypotheses(dp=2, tp=2), {"cut": WHOLE}, {"cut": quarters}, ratios)
        self.assertIn(("norm_local", "dp"), [(reason.kind, reason.axis) for reason in found])


class HonestyTest(TestCase):
    @pytest.mark.slow
    @settings(max_examples=200, deadline=None)
    @given(
        st.integers(0, 2**31),
        st.sampled_from([{"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 3}]),
        st.sampled_from([(4, 3), (6,), (1,), (2, 2, 3)]),
        st.sampled_from(["times", "sum", "mean"]),
    )
    def test_a_reason_gives_the_reference(self, seed, axes, shape, kind):
        """A reason is said only for values from which it makes the reference."""
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        one = hypotheses(**axes)
        ranks = len(one.places)
        noise = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(ranks)]
        self.assertFalse([r for r in one.of_tensor(whole, whole_of(*noise)) if not r.is_vague and whole.numel() > 1])
        if kind == "times":
            held = whole_of(*[ranks * whole] * ranks)
        else:
            mean = torch.stack(noise).mean(0)
            parts = [each - mean + whole * (1 if kind == "mean" else 1 / ranks) for each in noise]
            held = whole_of(*parts)
        kinds = {reason.kind for reason in one.of_tensor(whole, held)}
        expected = "times" if kind == "times" else f"missing_{kind}"
        self.assertIn(expected, kinds)


if __name__ == "__main__":
    run_tests()
