"""Checks of distributed state dicts, under the names of torch.testing._internal.distributed.common_state_dict."""

from torch_testing_ext._testing.sharded.state_dict_checks import (
    FusionEmbedding as FusionEmbedding,
    FusionEmbeddingWithHook as FusionEmbeddingWithHook,
    FusionEmbeddingWithModifier as FusionEmbeddingWithModifier,
    VerifyStateDictMixin as VerifyStateDictMixin,
)
