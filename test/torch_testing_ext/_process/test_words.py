"""The words that several rooms share."""

import unittest

from torch_testing_ext._process import words


class TestWords(unittest.TestCase):
    def test_a_number_has_its_noun(self) -> None:
        self.assertEqual([words.count(number, "test") for number in (0, 1, 2)], ["0 tests", "1 test", "2 tests"])

    def test_a_size_has_three_digits_and_a_sensible_unit(self) -> None:
        sizes = {
            0: "0 KiB",
            512: "0.5 KiB",
            1023 * 1024: "1023 KiB",
            2_000_000: "1.91 MiB",
            25 * 2**20: "25 MiB",
            1023 * 2**20: "1023 MiB",
            2**30: "1.0 GiB",
            int(79.6 * 2**30): "79.6 GiB",
        }
        self.assertEqual({amount: words.size_in_words(amount) for amount in sizes}, sizes)

    def test_any_text_has_bytes(self) -> None:
        self.assertEqual(words.in_bytes("ü"), b"\xc3\xbc")
        self.assertEqual(words.in_bytes("\udcff"), b"\xff")
        self.assertEqual(words.in_bytes(chr(0xD800)), b"\xed\xa0\x80")

    def test_names_that_are_cut_are_counted(self) -> None:
        self.assertEqual(words.first_names("abc", 3), "a, b, c")
        self.assertEqual(words.first_names("abcde", 3), "a, b, c and 2 more")
        self.assertEqual(words.first_names("abcdef"), "a, b, c, d, e and 1 more")

    def test_a_single_line_is_shown_rather_than_counted(self) -> None:
        self.assertEqual(words.few("abc", most=2), ["a", "b", "c"])
        self.assertEqual(words.few("abcd", most=2), ["a", "b", "and 2 more"])
        self.assertEqual(len(words.few("x" * 100)), words.MOST_LINES + 1)

    def test_ranks_are_listed_shortly(self) -> None:
        ranks = {
            (1,): "rank 1",
            (2, 0): "ranks 0, 2",
            (0, 1, 4): "ranks 0, 1, 4",
            (0, 1, 2, 3, 6): "ranks 0-3, 6",
            tuple(range(0, 64, 2)): "ranks 0, 2, ..., 62",
            tuple(range(64)): "ranks 0-63",
            (0, 2, 5, 7, 9, 11, 13, 15, 17): "ranks 0, 2, 5, 7, 9, 11, 13, 15, ... (9 in all)",
        }
        self.assertEqual({numbers: words.list_of(numbers) for numbers in ranks}, ranks)

    def test_values_are_grouped_in_order(self) -> None:
        groups = words.grouped([("b", 1), ("a", 2), ("b", 3)])
        self.assertEqual([*groups.items()], [("b", [1, 3]), ("a", [2])])

    def test_a_name_of_a_file_is_of_plain_characters(self) -> None:
        self.assertEqual(words.file_name("T.test_x[a/b: ü]-1"), "T.test_x_a_b____-1")


if __name__ == "__main__":
    unittest.main()
