"""Helpers for tests of sharded tensors, under the names of torch.testing._internal.distributed._shard."""
