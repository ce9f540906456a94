"""Ranks meet in a FileStore without its steps of 10 ms, in the store that the test sees."""

import os
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from multi_process_support import Ranks, check_held_backend, outcome_of, ranks_told

from torch_testing_ext import _torch
from torch_testing_ext._torch import rendezvous
from torch_testing_ext.common_utils import TestCase, run_tests

c10d: Any = dist.distributed_c10d


class Meeting(Ranks):
    def stores_of_gloo(self) -> None:
        """Only a FileStore is replaced, and only for gloo."""
        made: list[int] = []

        class Spied(rendezvous.PromptStore):
            def __init__(self, store: Any, path: str):
                super().__init__(store, path)
                made.append(dist.get_world_size() if dist.is_initialized() else 0)

        with mock.patch.object(rendezvous, "PromptStore", Spied):
            self.join_group()
            dist.new_group([0, 1])
            counts = [len(made)]
            dist.barrier()
            self.assertIs(type(dist.group.WORLD._get_backend(torch.device("cpu"))), dist.ProcessGroupGloo)
            self.assertIs(c10d.ProcessGroupGloo, dist.ProcessGroupGloo)
            store = c10d._get_default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            self.assertEqual((type(store), store.path), (dist.FileStore, self.file_name))
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            self.tell([*counts, len(made)])

    def meets_in_the_file(self) -> None:
        """The peers' addresses are in the file that the test named."""
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        self.assertIn(b"/0//cpu//0/1", Path(self.file_name).read_bytes())
        self.assertGreaterEqual(store.num_keys(), 2)
        dist.barrier()

    def nobody_comes(self) -> None:
        texts = []
        for name, wait in (("a", rendezvous.PROMPT_SECONDS), ("b", 0.0), ("c", None)):
            real = mock.patch.object(_torch, "prompt_rendezvous", rendezvous_of_torch)
            with real if wait is None else mock.patch.object(rendezvous, "PROMPT_SECONDS", wait):
                store = dist.FileStore(self.file_name + name, self.world_size)
                store.set_timeout(timedelta(seconds=0.5))
                with self.assertRaises(RuntimeError) as caught:
                    dist.init_process_group(
                        "gloo",
                        store=store,
                        rank=self.rank,
                        world_size=self.world_size,
                        timeout=timedelta(seconds=0.5),
                    )
                self.assertIs(c10d.ProcessGroupGloo, dist.ProcessGroupGloo)
                lines = str(caught.exception).splitlines()[:1]
                texts.append([type(caught.exception).__name__, *lines])
        self.tell(texts)

    def many(self) -> None:
        with (
            mock.patch.object(rendezvous, "MOST_RANKS", 1),
            mock.patch.object(rendezvous, "PromptStore", side_effect=AssertionError),
        ):
            self.join_group()
        dist.barrier()

    def connected_when_used(self) -> None:
        """Gloo then needs its store for as long as the group lives, and gets the test's."""
        with (
            mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"),
            mock.patch.object(rendezvous, "PromptStore", side_effect=AssertionError),
        ):
            self.join_group()
        check_held_backend(self)

    def a_subclass_of_gloo(self) -> None:
        """A test's own class takes the place of gloo's: it is left there."""

        made: list[type] = []

        class Own(dist.ProcessGroupGloo):
            def __init__(self, store: Any, *args: Any, **kwargs: Any):
                super().__init__(store, *args, **kwargs)
                made.append(type(store))

        with mock.patch.object(c10d, "ProcessGroupGloo", Own):
            self.join_group()
            self.assertIs(c10d.ProcessGroupGloo, Own)
        self.assertEqual(made, [dist.PrefixStore])
        dist.barrier()


class One(Meeting):
    world_size = 2

    def nobody_comes(self) -> None:
        if self.rank == 0:
            super().nobody_comes()
        else:
            self.tell([])


class rendezvous_of_torch:
    """Stands for `prompt_rendezvous`, and changes nothing."""

    def __enter__(self) -> list[Any]:
        return []

    def __exit__(self, *_: object) -> None: ...


class TestMeeting(TestCase):
    def test_stores_of_gloo(self) -> None:
        self.assertEqual(ranks_told(Meeting("stores_of_gloo")), [[2, 2]] * 2)

    def test_in_the_file_of_the_test(self) -> None:
        self.assertEqual(outcome_of(Meeting("meets_in_the_file")), ("passed", ""))

    def test_a_gloo_that_connects_when_it_is_used(self) -> None:
        self.assertEqual(outcome_of(Meeting("connected_when_used")), ("passed", ""))

    def test_not_with_many_ranks(self) -> None:
        self.assertEqual(outcome_of(Meeting("many")), ("passed", ""))

    def test_another_class_than_gloos(self) -> None:
        self.assertEqual(outcome_of(Meeting("a_subclass_of_gloo")), ("passed", ""))

    def test_if_nobody_comes_the_error_is_that_of_the_store(self) -> None:
        texts = ranks_told(One("nobody_comes"))[0]
        self.assertEqual(len(texts), 3)
        self.assertEqual(texts[0], texts[2])
        self.assertEqual(texts[1], texts[2])


class Recorded:
    """A store that is not prompt: it records what it is asked for."""

    def __init__(self, missing: int, path: Path):
        self.calls: list[str] = []
        self.missing = missing
        self.path = path

    def check(self, keys: list[str]) -> bool:
        self.calls.append("check")
        self.missing -= 1
        if self.missing >= 0:
            with self.path.open("a") as file:  # as if another key had come
                file.write("x")
        return self.missing < 0

    def get(self, key: str) -> bytes:
        self.calls.append("get")
        return b"value"

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.calls.append("wait")


class TestPromptStore(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name, "store")
        self.path.touch()

    def prompt(self, store: Any) -> rendezvous.PromptStore:
        return rendezvous.PromptStore(store, str(self.path))

    def test_the_store_is_asked_when_the_key_is_there(self) -> None:
        store = Recorded(2, self.path)
        self.assertEqual(self.prompt(store).get("key"), b"value")
        self.assertEqual(store.calls, ["check", "check", "check", "get"])
        store = Recorded(2, self.path)
        self.prompt(store).wait(["key"], timedelta(seconds=1))
        self.assertEqual(store.calls, ["check"] * 3)

    def test_a_file_that_does_not_change_is_not_read(self) -> None:
        store = Recorded(0, self.path)
        store.check = lambda keys: bool(store.calls.append("check"))  # type: ignore[method-assign]
        with mock.patch.object(rendezvous, "PROMPT_SECONDS", 0.05):
            self.prompt(store).wait(["key"])
        self.assertEqual(store.calls, ["check", "wait"])

    def test_a_store_without_its_file(self) -> None:
        store = Recorded(0, self.path)
        os.unlink(self.path)
        self.assertEqual(self.prompt(store).get("key"), b"value")

    def test_as_a_store(self) -> None:
        """All that gloo could ask for, through C++, gives what the FileStore gives."""
        plain = dist.FileStore(str(self.path), 2)
        prompt = self.prompt(dist.PrefixStore("b", plain))
        store = dist.PrefixStore("a", prompt)
        store.set("key", b"\0value\xff")
        self.assertEqual((store.get("key"), plain.get("b/a/key")), (b"\0value\xff",) * 2)
        self.assertEqual([store.add("count", 2), store.add("count", 3)], [2, 5])
        self.assertTrue(store.check(["key", "count"]))
        self.assertEqual(store.clone().get("key"), b"\0value\xff")
        self.assertFalse(store.check(["key", "none"]))
        self.assertEqual(store.compare_set("key", "other", "new"), plain.get("b/a/key"))
        store.wait(["key"])
        store.wait(["key"], timedelta(seconds=1))
        self.assertTrue(store.delete_key("key"))
        self.assertFalse(store.check(["key"]))
        begun = time.monotonic()
        with self.assertRaises(RuntimeError):
            store.wait(["none"], timedelta(seconds=0.1))
        self.assertGreaterEqual(time.monotonic() - begun, 0.1)


if __name__ == "__main__":
    run_tests()
