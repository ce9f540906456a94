"""What `kit_probe.py` asks a kit: functions by their titles, which get the kit and return an answer."""

import unittest

PROBES = {}


def probe(function):
    PROBES[function.__name__] = function
    return function


def attempt(function, *args, **kwargs):
    try:
        return repr(function(*args, **kwargs))
    except (Exception, unittest.SkipTest) as error:
        return f"{type(error).__name__}: {error}" if isinstance(error, unittest.SkipTest) else type(error).__name__
