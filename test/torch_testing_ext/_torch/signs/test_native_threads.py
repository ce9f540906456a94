"""Threads of torch's C++ that serve are known by their names and by how they wait."""

import pytest

from torch_testing_ext._torch.signs.native_threads import is_loop_of_connections, serves

LOOP = "232 0x5 0x7f0 0x40 0xa 0x0 0x8 0x7ffd 0x7f1"


@pytest.mark.parametrize("name", ["gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "pt_tcpstore"])
def test_names(name):
    assert serves(name, "running", "x86_64")


@pytest.mark.parametrize(
    ("syscall", "machine"),
    [
        ("running", "x86_64"),
        ("", "x86_64"),
        ("232", "x86_64"),
        ("232 0x5 0x7f0 0x40", "x86_64"),
        # More events, another time-out, another call, and the same number on other machines.
        (LOOP.replace("0x40", "0x80"), "x86_64"),
        (LOOP.replace("0xa", "0xffffffff"), "x86_64"),
        (LOOP.replace("232", "202"), "x86_64"),
        (LOOP, "aarch64"),
        (LOOP, "riscv64"),
    ],
)
def test_other_threads(syscall, machine):
    assert not is_loop_of_connections(syscall, machine)
    assert not serves("python3", syscall, machine)


def test_loops():
    assert is_loop_of_connections(LOOP, "x86_64")
    assert is_loop_of_connections(LOOP.replace("232", "22"), "aarch64")
    assert serves("python3", LOOP, "x86_64")
