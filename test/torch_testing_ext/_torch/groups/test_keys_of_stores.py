"""The keys that a store lacks are found while another thread waits for them."""

import threading
from datetime import timedelta

import torch.distributed as dist
from kit.own_process import in_own_process

from torch_testing_ext._torch.groups.keys_of_stores import missing_keys


def test_a_file(tmp_path):
    store = dist.FileStore(str(tmp_path / "keys"), 1)
    store.set("a", "")
    assert missing_keys(store, ["a", "b", "c"]) == ["b", "c"]
    assert missing_keys(dist.PrefixStore("other", store), ["a", "b"]) == ["a", "b"]


@in_own_process
def test_a_server_while_a_thread_waits():
    server = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60))
    store = dist.PrefixStore("keys", server)
    store.set("a", "")
    waiting = threading.Thread(target=store.wait, args=(["a", "b"],))
    waiting.start()
    assert missing_keys(store, ["a", "b"]) == ["b"]
    dist.PrefixStore("keys", server.clone()).set("b", "")
    waiting.join()


def test_what_cannot_be_asked(tmp_path):
    assert missing_keys(None, ["a", "b"]) == ["a", "b"]
    store = dist.FileStore(str(tmp_path / "keys"), 1)
    many = [str(number) for number in range(100)]
    store.set("0", "")
    assert missing_keys(store, many) == many
