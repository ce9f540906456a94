"""Sound trainings of the kinds that people run: none is told, and nothing stays uncompared that could be compared."""

import layout_programs_of_torch as programs
import pytest
import torch

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.layouts import check_layouts

# Flat parameters are beside the reference's: FSDP1 is said to be not compared.
FLAT = "fsdp1"
CUT_BY_POSITIONS = {"the samples": "a sequence axis cuts them"}
LOW_PRECISION = ("ddp", "fsdp2", "tp", "1f1b", "megatron", "ring")


@pytest.mark.nightly
class SoundLayoutsTest(TestCase):
    def test_float64(self):
        # What the compiler imports is imported once, before ranks are forked.
        torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1)).sum().backward()
        for name, (train, *texts) in programs.SOUND.items():
            with self.subTest(name):
                for report in check_layouts(train, *texts):
                    left_out = report.not_compared
                    expected = CUT_BY_POSITIONS if "cp=" in report.layout else {}
                    self.assertTrue(left_out == expected or name == FLAT, left_out)
                    self.assertGreater(report.compared, 30)

    def test_bfloat16(self):
        for name in LOW_PRECISION:
            train, text, *_ = programs.SOUND[name]
            with self.subTest(name):
                check_layouts(train, text, dtypes=(torch.bfloat16,))


if __name__ == "__main__":
    run_tests()
