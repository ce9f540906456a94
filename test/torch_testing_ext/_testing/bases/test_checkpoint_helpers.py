"""Mock groups, common temporary directories, checks of state dicts."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.ranks import Ranks, ranks_told
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed.checkpoint_utils import with_checkpoint_logging, with_temp_dir
from torch_testing_ext.distributed.common_state_dict import (
    FusionEmbedding,
    FusionEmbeddingWithHook,
    FusionEmbeddingWithModifier,
    VerifyStateDictMixin,
)
from torch_testing_ext.distributed.distributed_utils import mock_init_dist, with_dist, with_fake_comms


class TestFakeComms(TestCase):
    def test_destroyed_after_an_error(self) -> None:
        @with_fake_comms(rank=1, world_size=3)
        def fail(self: Any) -> None:
            raise KeyError(dist.get_rank())

        with self.assertRaisesRegex(KeyError, "1"):
            fail(self)
        self.assertFalse(dist.is_initialized())

    def test_refused_if_a_group_exists(self) -> None:
        with with_dist(), self.assertRaisesRegex(AssertionError, "a default process group exists already"):
            mock_init_dist(0, 1)


class WithDirectory(Ranks):
    @with_temp_dir
    def _told(self) -> None:
        self.tell(self.temp_dir)

    def is_the_same(self) -> None:
        self.join_group()
        self._told()

    def fails_within(self) -> None:
        self.join_group()
        tempfile.tempdir = os.environ["TMPDIR"]
        self._fails_in_one()

    @with_temp_dir
    def _fails_in_one(self) -> None:
        if self.rank == 1:
            raise KeyError("as told")

    def reads_to_the_end(self) -> None:
        """Rank 0 finishes long before."""
        self.join_group()

        @with_temp_dir
        def look(self: Any) -> None:
            if self.rank == 0:
                open(os.path.join(self.temp_dir, "written"), "w").close()
            dist.barrier()
            if self.rank == 1:
                self.tell(os.listdir(self.temp_dir))

        look(self)


class TestTempDir(TestCase):
    def test_common_to_all_ranks_and_removed_afterwards(self) -> None:
        first, second = ranks_told(WithDirectory("is_the_same"))
        self.assertEqual(first, second)
        self.assertFalse(os.path.exists(first))

    def test_rank_0_waits_for_the_others(self) -> None:
        self.assertEqual(ranks_told(WithDirectory("reads_to_the_end")), [["written"]])

    def test_the_error_of_the_test_is_reported(self) -> None:
        # Rank 0 waits for rank 1, and is ended there.
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TMPDIR=folder):
            self.assertRegex(outcome_of(WithDirectory("fails_within")).message, "rank 1 of 2 raised .*as told")
            self.assertEqual(len(os.listdir(folder)), 1)

    def test_without_a_group(self) -> None:
        seen = []

        class Holder:
            temp_dir: str

            @with_temp_dir
            def look(self, *args: int, **kwargs: int) -> None:
                seen.append((os.path.isdir(self.temp_dir), args, kwargs))

        holder = Holder()
        holder.look(1, two=2)
        self.assertEqual(seen, [(True, (1,), {"two": 2})])
        self.assertFalse(os.path.exists(holder.temp_dir))

    def test_takes_a_function(self) -> None:
        with self.assertRaisesRegex(AssertionError, "write @with_temp_dir"):
            with_temp_dir()

    def test_logging(self) -> None:
        logger = logging.getLogger("torch.distributed.checkpoint")
        before = logger.level
        levels = []
        with_checkpoint_logging(lambda self: levels.append(logger.level), level=logging.DEBUG)(self)
        self.assertEqual(levels, [logging.DEBUG])
        self.assertEqual(logger.level, before)


class TestStateDicts(TestCase, VerifyStateDictMixin):
    """Without ranks: a full state dict replaces a gathered one."""

    def setUp(self) -> None:
        super().setUp()
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()

    def by_name(self) -> dict[str, Any]:
        osd = copy.deepcopy(self.optimizer.state_dict())
        names = ["weight", "bias"]
        groups = [{**group, "params": [names[n] for n in group["params"]]} for group in osd["param_groups"]]
        return {"state": {names[n]: states for n, states in osd["state"].items()}, "param_groups": groups}

    def verify(self, dist_osd: dict[str, Any]) -> None:
        self._verify_osd(self.model, self.optimizer, self.optimizer.state_dict(), dist_osd)

    def test_same(self) -> None:
        self._verify_msd(self.model.state_dict(), copy.deepcopy(self.model.state_dict()))
        self.verify(self.by_name())
        new = torch.optim.Adam(self.model.parameters())
        self._verify_osd_by_load(self.model, self.optimizer, new, self.by_name())

    def test_groups_may_be_split(self) -> None:
        osd = self.by_name()
        (group,) = osd["param_groups"]
        osd["param_groups"] = [{**group, "params": [name]} for name in group["params"]]
        self.verify(osd)

    @parametrize("what", ["number", "missing", "option", "group"])
    def test_other_optimizer_state(self, what: str) -> None:
        osd = self.by_name()
        if what == "number":
            osd["state"]["bias"]["exp_avg"] += 1
        elif what == "missing":
            del osd["state"]["bias"]
        elif what == "option":
            osd["param_groups"][0]["lr"] *= 2
        else:
            osd["param_groups"][0]["params"].remove("bias")
        with self.assertRaises(AssertionError):
            self.verify(osd)

    def test_other_parameters(self) -> None:
        other = copy.deepcopy(self.model.state_dict())
        other["bias"] += 1
        with self.assertRaisesRegex(AssertionError, "^bias: "):
            self._verify_msd(self.model.state_dict(), other)
        del other["bias"]
        with self.assertRaises(AssertionError):
            self._verify_msd(self.model.state_dict(), other)

    def test_frozen_parameters_may_be_missing(self) -> None:
        whole = dict(self.model.named_parameters())
        part = {"weight": whole["weight"]}
        options = StateDictOptions(ignore_frozen_params=True)
        with self.assertRaisesRegex(AssertionError, "bias is not frozen, and missing"):
            self._verify_msd(whole, part, options)
        whole["bias"].requires_grad_(False)
        self._verify_msd(whole, part, options)


class TestFusionEmbedding(TestCase):
    def test_names(self) -> None:
        plain = FusionEmbedding(2, 3, 4)
        self.assertEqual(list(plain.state_dict()), ["embedding.weight", "fusion_embedding.weight"])
        self.assertEqual(sorted(FusionEmbeddingWithHook(2, 3, 4).state_dict()), ["fusion_embedding.weight", "weight"])

    @parametrize("nested", [False, True])
    def test_round_trip(self, nested: bool) -> None:
        def make() -> nn.Module:
            model = FusionEmbeddingWithModifier(2, 3, 4)
            return nn.Sequential(model) if nested else model

        saved, loaded = make(), make()
        set_model_state_dict(loaded, get_model_state_dict(saved))
        self.assertEqual(dict(saved.named_parameters()), dict(loaded.named_parameters()))


instantiate_parametrized_tests(TestStateDicts)
instantiate_parametrized_tests(TestFusionEmbedding)

if __name__ == "__main__":
    run_tests()
