"""What the bridge makes of what Ray says, and how the project is sent and kept; no Ray is needed."""

import io
import os
import shutil
import tarfile
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.cluster import ray_actor, shipping
from torch_testing_ext.runner.cluster.bridge import Bridge, describe
from torch_testing_ext.runner.cluster.bridge_protocol import Connect
from torch_testing_ext.runner.cluster.shipping import pack


class TestNodesOfBridge(unittest.TestCase):
    """What the bridge makes of what Ray says about nodes; no Ray is needed."""

    def bridge(self, **request):
        chosen = {"nodes": None, "gpus_per_node": None, **request}
        empty = dict.fromkeys(("folder", "archive", "root", "digest", "setup"), "")
        return Bridge(None, Connect("host:1", environ={}, on_path=True, **empty, **chosen), None)

    def nodes(self, *nodes):
        keys = ("NodeID", "NodeManagerHostname", "NodeManagerAddress", "Resources")
        return {node[0]: dict(zip(keys, node, strict=True)) for node in nodes}

    TWO = (("a" * 12, "one", "10.0.0.1", {"CPU": 8.0, "GPU": 2.0}), ("b" * 12, "two", "10.0.0.2", {"CPU": 8.0}))

    def names(self, *nodes):
        bridge = self.bridge()
        bridge._name(self.nodes(*nodes))
        return sorted(bridge._names.values())

    def test_names(self):
        (a, host, address, has), b = self.TWO
        self.assertEqual(self.names(*self.TWO), ["one", "two"])
        self.assertEqual(self.names((a, host, address, has), (b[0], host, *b[2:])), ["10.0.0.1", "10.0.0.2"])
        self.assertEqual(
            self.names((a, host, address, has), (b[0], host, address, has)), ["10.0.0.1-aaaaaa", "10.0.0.1-bbbbbb"]
        )

    def test_infeasible(self):
        for wanted, said in {None: "", 2: "", 3: "no node of the cluster at host:1 has 3 GPUs and a CPU"}.items():
            bridge = self.bridge(gpus_per_node=wanted)
            bridge._name(self.nodes(*self.TWO))
            self.assertIn(said, bridge._infeasible(self.nodes(*self.TWO)))
            self.assertEqual(bool(said), bool(bridge._infeasible(self.nodes(*self.TWO))))

    def test_no_agent_can_start(self):
        """Each node was lost as often as is tried, before any had joined."""
        nodes = self.nodes(*self.TWO)
        bridge = self.bridge()
        self.assertEqual(bridge._hopeless(nodes), "")
        for losses, hopeless in ((1, False), (2, True)):
            bridge._losses = dict.fromkeys(nodes, losses)
            self.assertEqual(bool(bridge._hopeless(nodes)), hopeless)
        bridge._last_loss = "node two: no memory"
        self.assertEqual(
            bridge._hopeless(nodes), "no agent can start on any node of the cluster at host:1: node two: no memory"
        )
        bridge._any_joined = True
        self.assertEqual(bridge._hopeless(nodes), "")

    def test_waits_for(self):
        nodes = self.nodes(*self.TWO)
        self.assertEqual(
            self.bridge(nodes=3)._waits_for(nodes),
            "3 nodes (--cluster-nodes), of which 0 are free; the cluster has 2",
        )
        self.assertEqual(self.bridge()._waits_for(nodes), "a CPU on one of 2 nodes, which others use")
        self.assertIn("4 GPUs and a CPU on one of", self.bridge(gpus_per_node=4)._waits_for(nodes))

    def test_what_ray_says_when_something_is_full(self):
        for kind, said in {
            "OutOfMemoryError": "Ray ended its actor, because the node is out of memory",
            "ObjectStoreFullError": "the object store of Ray has no room for the project: use --cluster-root",
            "OutOfDiskError": "the object store of Ray has no room for the project: use --cluster-root",
        }.items():
            error = type(kind, (Exception,), {})("details")
            self.assertIn(said, describe(error))
            of_actor = type(f"RayTaskError({kind})", (Exception,), {"cause": error})
            self.assertIn(said, describe(of_actor("\x1b[36mray::AgentActor.start()")))
        self.assertEqual(describe(ValueError("\x1b[36mray\x1b[39m")), "ValueError: ray")

    def test_no_cluster_on_this_machine(self):
        error = ConnectionError("Could not find any running Ray instance. Please specify the one")
        self.assertEqual(describe(error), "none runs on this machine, and RAY_ADDRESS names none")


class TestShipping(unittest.TestCase):
    """A node keeps what it was sent, under a key that depends on the files alone; no Ray is needed."""

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="torch_testing_ext_test_"))
        self.addCleanup(shutil.rmtree, self.folder)

    def pack(self, name, text="x = 1\n", mode=0o644):
        root = self.folder / name
        (root / "sub").mkdir(parents=True)
        (root / "sub" / "a.py").write_text(text)
        (root / "b.sh").write_text("echo")
        (root / "b.sh").chmod(mode)
        (root / "link").symlink_to("sub/a.py")
        os.utime(root / "b.sh", (1, len(name)))
        pack(root, root.with_suffix(".tar"))
        return root.with_suffix(".tar").read_bytes()

    def test_the_key(self):
        key = ray_actor.key_of(self.pack("one"))
        self.assertEqual(key, ray_actor.key_of(self.pack("another")))
        self.assertNotEqual(key, ray_actor.key_of(self.pack("text", text="x = 2\n")))
        self.assertNotEqual(key, ray_actor.key_of(self.pack("mode", mode=0o755)))

    def test_a_file_that_goes_while_the_project_is_packed(self):
        """As another run of the same checkout may remove its own."""
        with mock.patch.object(shipping, "_walk", lambda root: iter(["gone", "b.sh"])):
            archive = self.pack("one")
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            self.assertEqual(tar.getnames(), ["b.sh"])

    def test_what_a_node_keeps(self):
        base = str(self.folder)
        archives = [f"project {number}".encode() for number in range(ray_actor.MOST_KEPT + 1)]
        keys = [ray_actor.key_of(archive) for archive in archives]
        self.assertIsNone(ray_actor.kept_archive(base, keys[0]))
        for number, archive in enumerate(archives):
            ray_actor.keep_archive(base, keys[number], archive)
            moment = 1000 if number == 0 else number  # the first is used in each run
            os.utime(self.folder / f"{keys[number]}.tar", (moment, moment))
        found = [ray_actor.kept_archive(base, key) for key in keys]
        self.assertEqual(found, [archives[0], None, *archives[2:]])
        self.assertEqual(len(list(self.folder.iterdir())), ray_actor.MOST_KEPT)
        (self.folder / f"{keys[0]}.tar").write_bytes(b"changed")
        self.assertIsNone(ray_actor.kept_archive(base, keys[0]))
        self.assertFalse((self.folder / f"{keys[0]}.tar").exists())

    def test_no_folder_to_keep_it_in(self):
        ray_actor.keep_archive(str(self.folder / "none"), "key", b"project")
        self.assertIsNone(ray_actor.kept_archive(str(self.folder / "none"), "key"))

    def test_the_bridge_sends_it_once_and_only_where_it_is_missing(self):
        (self.folder / "project.tar").write_bytes(b"project")
        puts = []
        ray = types.SimpleNamespace(get=lambda value: value, put=lambda data: puts.append(data) or ("in store", data))
        request = dict.fromkeys(("folder", "root", "digest", "setup"), "")
        archive = str(self.folder / "project.tar")
        bridge = Bridge(None, Connect("host:1", None, None, environ={}, on_path=True, archive=archive, **request), ray)
        bridge._key = "key"
        node = lambda has: types.SimpleNamespace(has=types.SimpleNamespace(remote=lambda key: has))  # noqa: E731
        self.assertIsNone(bridge._archive_for(node(True)))
        self.assertEqual(puts, [])
        for _ in range(2):
            self.assertEqual(bridge._archive_for(node(False)), ("in store", b"project"))
        self.assertEqual(puts, [b"project"])


if __name__ == "__main__":
    run_tests()
