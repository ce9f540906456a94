"""Streams that are late: run with --fake-accelerators 2 and TORCH_TESTING_EXT_FAKE_LATE_STREAMS=1.

Ranks come first: a process that has used a device cannot fork ranks that use one.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

KIND = "fakeacc"


def on_other_stream():
    """A stream, and a tensor of ones that it makes."""
    stream = torch.fakeacc.Stream()
    with torch.fakeacc.stream(stream):
        x = torch.zeros(4, device=KIND) + 1
    return stream, x


@pytest.mark.world_size(2)
def test_collective(dist_env):
    x = torch.ones(4, device=dist_env.device)
    work = dist.all_reduce(x, async_op=True)
    with pytest.warns(UserWarning, match="has not waited"):
        assert (x + 1).isnan().all()
    work.wait()
    assert x.tolist() == [2] * 4


@pytest.mark.world_size(2)
def test_what_is_sent_may_be_read(dist_env):
    x = torch.ones(4, device=dist_env.device)
    if dist_env.rank == 0:
        work = dist.isend(x, 1)
        assert (x + 1).tolist() == [2] * 4
        work.wait()
    else:
        received = torch.zeros(4, device=dist_env.device)
        work = dist.irecv(received, 0)
        with pytest.warns(UserWarning, match="has not waited"):
            assert (received + 1).isnan().all()
        work.wait()
        assert received.tolist() == [1] * 4


@pytest.mark.world_size(2)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_what_torch_waits_for_itself(dist_env, wrap, recwarn):
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dist_env.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=dist_env.device)).sum().backward()
        optimizer.step()
    for parameter in model.parameters():
        assert not parameter.isnan().any()
    assert [str(warning.message) for warning in recwarn if "fake accelerator" in str(warning.message)] == []


def test_wait_stream_is_missing():
    _, x = on_other_stream()
    with pytest.warns(UserWarning, match="aten::add on stream 0 reads a tensor that another stream writes"):
        assert (x + 1).isnan().all()


def test_wait_stream():
    stream, x = on_other_stream()
    torch.fakeacc.current_stream().wait_stream(stream)
    assert (x + 1).tolist() == [2] * 4


def test_event():
    stream, x = on_other_stream()
    event = stream.record_event()
    event.wait()
    assert (x + 1).tolist() == [2] * 4


def test_event_that_was_recorded_too_early():
    stream = torch.fakeacc.Stream()
    event = stream.record_event()
    with torch.fakeacc.stream(stream):
        x = torch.zeros(4, device=KIND) + 1
    event.wait()
    with pytest.warns(UserWarning, match="has not waited"):
        assert (x + 1).isnan().all()


def test_synchronize():
    _, x = on_other_stream()
    torch.accelerator.synchronize()
    assert (x + 1).tolist() == [2] * 4


def test_copy_to_pinned_memory():
    pinned = torch.zeros(4).pin_memory()
    pinned.copy_(torch.ones(4, device=KIND), non_blocking=True)
    assert pinned.isnan().all()
    torch.accelerator.synchronize()
    assert pinned.tolist() == [1] * 4
