import unittest


class T(unittest.TestCase):
    def test_passes(self):
        pass

    def test_fails(self):
        self.assertEqual(1, 2)

    def test_raises(self):
        raise ValueError("no such thing")

    def test_skips(self):
        self.skipTest("not today")

    @unittest.skip("never")
    def test_is_skipped(self):
        raise ValueError

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        self.fail()

    @unittest.expectedFailure
    def test_passes_against_expectation(self):
        pass

    def test_exits(self):
        raise SystemExit(3)

    def test_interrupts(self):
        raise KeyboardInterrupt

    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
