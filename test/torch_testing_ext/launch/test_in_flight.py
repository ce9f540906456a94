"""Tests which of several exceptions is a rank's own: the one in flight, not one that is handled, nor one of a peer."""

import contextlib
import threading

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.launch import exceptions_in_flight


def lose_the_peer():
    raise RuntimeError("[../gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:12345")


class Leaving:
    def __init__(self, function):
        self.function = function

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.function()


def in_finally(then):
    try:
        raise ValueError("own")
    finally:
        then()


def in_exit(then):
    with Leaving(then):
        raise ValueError("own")


def raised_again(then):
    try:
        raise ValueError("own")
    except ValueError:
        then()
        raise


def in_finally_after_one_that_was_handled(then):
    try:
        try:
            raise KeyError("handled")
        except KeyError:
            raise ValueError("own") from None
    finally:
        then()


def in_finally_that_handles_another(then):
    try:
        raise ValueError("own")
    finally:
        try:
            raise KeyError("handled")
        except KeyError:
            then()


def handled(then):
    try:
        raise ValueError("handled")
    except ValueError:
        then()


def handled_where_others_are_raised_again(then):
    try:
        raise ValueError("handled")
    except ValueError as error:
        then()
        if str(error) != "handled":
            raise


def in_finally_of_a_handler(then):
    try:
        raise ValueError("handled")
    except ValueError:
        try:
            pass
        finally:
            then()


def alone(then):
    then()


IN_FLIGHT = [
    in_finally,
    in_exit,
    raised_again,
    in_finally_after_one_that_was_handled,
    in_finally_that_handles_another,
]
HANDLED = [handled, handled_where_others_are_raised_again, in_finally_of_a_handler, alone]


class InFlightTest(TestCase):
    def test_before_a_lost_peer(self):
        for function, own in [*((one, True) for one in IN_FLIGHT), *((one, False) for one in HANDLED)]:
            with self.subTest(function=function.__name__):
                try:
                    function(lose_the_peer)
                except Exception as error:
                    found = exceptions_in_flight.raised_by_itself(error)
                    self.assertEqual(found is error, not own)
                self.assertEqual(str(found) == "own", own, str(found))

    def test_an_error_of_its_own_counts(self):
        def fail():
            raise KeyError("later")

        for function in (*IN_FLIGHT, *HANDLED):
            try:
                function(fail)
            except Exception as error:
                self.assertIs(exceptions_in_flight.raised_by_itself(error), error)

    def test_seen_by_another_thread(self):
        seen = []

        def look():
            thread = threading.Thread(target=lambda: seen.append(exceptions_in_flight.of_main_thread()))
            thread.start()
            thread.join()

        for function in (*IN_FLIGHT, *HANDLED):
            with contextlib.suppress(ValueError):
                function(look)
        self.assertEqual([str(one) for one in seen], ["own"] * len(IN_FLIGHT) + ["None"] * len(HANDLED))


if __name__ == "__main__":
    run_tests()
