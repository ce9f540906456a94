"""Sends and receives of gloo are noted with their line, peer and tag."""

import pickle
import sys

import torch
import torch.distributed as dist
from kit.own_process import error_of, in_own_process
from kit.plain_groups import two_groups

from torch_testing_ext._torch.groups import gloo_messages, made_groups
from torch_testing_ext._torch.groups.collective_errors import errors
from torch_testing_ext._torch.groups.gloo_messages import latest_message_of, message_of_work, messages_of_process


def watched():
    """Both ends of a group whose messages are noted."""
    gloo_messages.watch_messages()
    groups = []
    for rank, backend in enumerate(two_groups(2.0)):
        group = dist.ProcessGroup(dist.HashStore(), rank, 2)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        made_groups.numbers_of_groups[group] = rank
        made_groups.noted_groups.append(made_groups.MadeGroup(f"g{rank}", "pair", (0, 1), rank, "world", 1))
        groups.append(group)
    return groups


def entries():
    dumps = messages_of_process.dump()
    return pickle.loads(dumps[0][1])["entries"] if dumps else []


@in_own_process
def test_messages():
    first, second = watched()
    line = sys._getframe().f_lineno + 1
    sent = first.send([torch.ones(3, 2)], 1, 5)
    received = second.recv(tensors=[torch.ones(3, 2)], srcRank=0, tag=5)
    assert (message_of_work(sent), message_of_work(received), message_of_work(None)) == (0, 1, None)
    sent.wait(), received.wait()
    work = second.send([torch.ones(1, dtype=torch.int64)], 0, 6)
    first.recv_anysource([torch.ones(1, dtype=torch.int64)], 6).wait()
    work.wait()
    found = [(e["profiling_name"], e["peer"], e["tag"], e["input_sizes"], e["input_dtypes"]) for e in entries()]
    assert found == [
        ("gloo:send", 1, 5, [(3, 2)], ["float32"]),
        ("gloo:recv", 0, 5, [(3, 2)], ["float32"]),
        ("gloo:send", 0, 6, [(1,)], ["int64"]),
        ("gloo:recv", None, 6, [(1,)], ["int64"]),
    ]
    frame = {"filename": __file__, "line": line, "name": "test_messages"}
    assert entries()[0]["frames"] == [frame] and entries()[0]["process_group"] == ("g0", "pair")
    assert entries()[0]["timeout_ms"] == 2000 and all(entry["is_issued"] for entry in entries())


@in_own_process
def test_latest_message():
    """Only while somebody has its work."""
    import threading

    first, second = watched()
    work = first.send([torch.ones(1)], 1, 5)
    thread = threading.get_ident()
    assert latest_message_of(thread) == 0 and latest_message_of(thread + 1) is None
    second.recv([torch.ones(1)], 0, 5).wait()
    work.wait()
    del work
    assert latest_message_of(thread) is None
    messages_of_process.forget()
    assert messages_of_process.count() == 0 and entries() == []


@in_own_process
def test_messages_that_are_not_noted():
    """Those of groups that nobody knows, and those with arguments that torch refuses."""
    first, second = watched()
    made_groups.numbers_of_groups.pop(second)
    work = second.send([torch.ones(1)], 0, 5)
    assert isinstance(error_of(lambda: first.send([torch.ones(1)], 1)), TypeError)
    assert messages_of_process.count() == 0
    first.recv([torch.ones(1)], 1, 5).wait()
    work.wait()
    assert [entry["profiling_name"] for entry in entries()] == ["gloo:recv"]


@in_own_process
def test_messages_that_raise():
    """One that was not issued is none; one whose peer has gone stays, and uses up no number."""
    first, _ = watched()
    errors.watch(lambda error: "peer" in str(error))
    tensor = [torch.ones(4).to_sparse()]
    assert error_of(lambda: first.send(tensor, 1, 5)) and messages_of_process.count() == 0
    gloo_messages.errors._is_of_lost_peer = lambda error: True
    assert error_of(lambda: first.send(tensor, 1, 5))
    assert [entry["is_issued"] for entry in entries()] == [False] and len(errors.moments) == 1


@in_own_process
def test_too_many_messages():
    """Then none is known."""
    gloo_messages._MOST_MESSAGES = 2
    first, second = watched()
    works = []
    for tag in range(3):
        works += [first.send([torch.ones(1)], 1, tag), second.recv([torch.ones(1)], 0, tag)]
    for work in works:
        work.wait()
    ((_, data),) = messages_of_process.dump()
    assert pickle.loads(data) == {"entries": [], "messages": False}


@in_own_process
def test_barriers():
    """They are made of messages, which use up numbers; a thread is known to be in one."""
    import threading

    first, second = watched()
    thread = threading.Thread(target=second.monitored_barrier)
    thread.start()
    while not gloo_messages.is_in_barrier(thread.ident):
        pass
    assert [(entry["retired"], entry["messages"]) for entry in entries()] == [(False, 2)]
    first.monitored_barrier()
    thread.join()
    assert not gloo_messages.is_in_barrier(thread.ident) and not gloo_messages.is_in_barrier(threading.get_ident())
    numbers = [group._get_backend(torch.device("cpu"))._get_sequence_number_for_group() for group in (first, second)]
    assert [entry["messages"] for entry in entries()] == numbers[::-1] == [2, 2]


@in_own_process
def test_barriers_note_their_errors():
    from datetime import timedelta

    first, _ = watched()
    assert error_of(lambda: first.monitored_barrier(timedelta(milliseconds=20)))
    assert len(errors.moments) == 1
    ((name, at),) = messages_of_process.times_of_barriers()
    (entry,) = entries()
    assert (name, at) == ("g0", entry["time_created_ns"]) and entry["timeout_ms"] == 20
    assert (entry["profiling_name"], entry["retired"]) == ("gloo:monitored_barrier", True)
