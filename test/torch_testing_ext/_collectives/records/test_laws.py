"""Laws of growth, on claims that are written here."""

import unittest

from torch_testing_ext._collectives.records.growth_laws import GrowthClaim, largest_of, why_not_kept
from torch_testing_ext.common_utils import run_tests


def claims(*amounts, at_most=0.0, lines=()):
    return largest_of([[GrowthClaim("bytes", at_most, amount, lines)] for amount in amounts])


class LawTest(unittest.TestCase):
    def test_exponents(self):
        for at_most, kept, exceeded in ((0, 64, 65), (1, 128, 129), (-1, 32, 33), (0.5, 90, 91)):
            with self.subTest(at_most):
                small = claims(64, at_most=at_most)
                self.assertEqual(why_not_kept(small, 4, claims(kept, at_most=at_most), 8), "")
                said = why_not_kept(small, 4, claims(exceeded, at_most=at_most), 8)
                self.assertIn(f"bytes grow with the world: 64 in 4 ranks, {exceeded} in 8, at_most={at_most}", said)

    def test_the_rank_with_most_counts(self):
        self.assertEqual(why_not_kept(claims(64, 128), 2, claims(8, 8, 128, 64), 4), "")
        self.assertIn("128 in 2 ranks, 129 in 4", why_not_kept(claims(64, 128), 2, claims(8, 129, 0, 64), 4))

    def test_claims_of_the_same_words_are_told_apart(self):
        first, second = GrowthClaim("bytes", 0.0, 8), GrowthClaim("bytes", 0.0, 64)
        small = largest_of([[first, second]])
        self.assertEqual([claim.amount for claim in small.values()], [8, 64])
        large = largest_of([[first._replace(amount=16), second]])
        self.assertIn("8 in 2 ranks, 16 in 4", why_not_kept(small, 2, large, 4))

    def test_places_that_have_changed(self):
        places = tuple(f"8 by send at x.py:{line}" for line in range(20))
        said = why_not_kept(claims(8, lines=places[:1]), 2, claims(160, lines=places), 4).splitlines()
        self.assertEqual(said[1], "    in 4: 8 by send at x.py:1")
        self.assertEqual(said[-1], "    in 4: ... and 13 places more")
        self.assertEqual(len(said), 8)


if __name__ == "__main__":
    run_tests()
