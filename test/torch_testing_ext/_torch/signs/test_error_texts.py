"""Texts of torch's errors say why something has failed."""

import pytest

from torch_testing_ext._torch.signs import error_texts

LOST = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4021",
    "Read error [127.0.0.1]:4021: Connection reset by peer",
    "writev [127.0.0.1]:4021: Broken pipe",
    "NCCL error: remote process exited or there was a network error",
    "NCCL error in: x.cpp, remote error",
    "failed to recv, got 0 bytes",
    "recvValue failed on SocketImpl(fd=3)",
]
GAVE_UP = [
    "Timed out waiting 50ms for recv operation to complete",
    "Timed out after 2 seconds waiting for rank 1",
    "Wait timeout",
]


@pytest.mark.parametrize("text", LOST)
def test_lost_peers(text):
    assert error_texts.LOST_PEER.search(text)
    assert not error_texts.GAVE_UP.search(text)


@pytest.mark.parametrize("text", GAVE_UP)
def test_time_outs(text):
    assert error_texts.GAVE_UP.search(text)
    assert not error_texts.LOST_PEER.search(text)


@pytest.mark.parametrize("text", ["Expected all tensors to be on the same device", "division by zero", ""])
def test_other_errors(text):
    assert not error_texts.LOST_PEER.search(text) and not error_texts.GAVE_UP.search(text)
    assert not error_texts.PORT_IN_USE.search(text)


def test_ports():
    assert error_texts.PORT_IN_USE.search("The server socket has failed to listen. code: -98, name: EADDRINUSE")
    assert error_texts.has_one_of(OSError("x: address already in use"), [error_texts.ADDRESS_IN_USE])
    assert not error_texts.has_one_of(OSError("x: address"), [error_texts.ADDRESS_IN_USE, error_texts.CONNECT_TIMEOUT])


def test_lines_that_say_why():
    assert error_texts.lines_that_say_why("first\nC++ stack:\n #0") == "first"
    text = "Rank 0 has failed monitoredBarrier\nranks 1, 2 did not come"
    assert error_texts.lines_that_say_why(text) == text


def test_places_in_cpp():
    text = "[/pytorch/gloo/transport/unbound_buffer.cc:81] Timed out [enforce fail at alloc.cpp:75] [0] x.h:3"
    assert error_texts.without_cpp_place(text) == "Timed out [enforce fail at alloc.cpp:75] [0] x.h:3"


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (error_texts.is_of_ambiguous_tensor, "Boolean value of Tensor with more than one value is ambiguous"),
        (error_texts.is_of_unsupported_dtensor, "aten.x: got mixed torch.Tensor and DTensor, convert them"),
        (error_texts.is_of_unsupported_dtensor, "Operator x does not have a sharding strategy registered."),
        (error_texts.is_of_missing_triton, "Cannot find a working Triton installation"),
    ],
)
def test_questions(question, text):
    assert question(RuntimeError(text))
    assert not question(RuntimeError("something else"))
