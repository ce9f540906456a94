"""What the bridge makes of what Ray says, and how the project is sent and kept; no Ray is needed."""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import types
import unittest
from pathlib import Path
from unittest import mock

from kit.agents import prepare_for
from kit.files import subject

from torch_testing_ext._process.devices_setting import DEVICES_OF_RUN
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.cluster import ray_actor, ray_launcher, shipment
from torch_testing_ext.runner.cluster.agent_messages import ClusterError
from torch_testing_ext.runner.cluster.bridge import Bridge, RayView
from torch_testing_ext.runner.cluster.bridge_messages import CannotConnect, Connect, TakeMore
from torch_testing_ext.runner.cluster.cluster_site import ClusterSite
from torch_testing_ext.runner.cluster.held_node import ProjectStore, UnfitNode, describe_error
from torch_testing_ext.runner.cluster.node_choice import HeldState, Room, SeenNode, Wish, choose_nodes
from torch_testing_ext.runner.cluster.node_environment import (
    environment_for_nodes,
    notes_on_environment,
    withheld_variables,
)
from torch_testing_ext.runner.scheduling.node_leases import NodeLeases

HERE = {
    "MINE": "1",
    "MINE_2": "2",
    "AUTHOR": "me",
    "HF_TOKEN": "s",
    "AWS_SECRET_ACCESS_KEY": "s",
    "HOME": "/h",
    "RAY_X": "1",
    "CUDA_VISIBLE_DEVICES": "0",
    "TORCH_TESTING_EXT_RUN_JOBS": "1",
    "ODD": "\udcff",
}


class TestEnvironment(unittest.TestCase):
    def test_what_is_sent(self):
        for choice, sent in {
            "": {"MINE", "AUTHOR", "MINE_2"},
            "MINE": {"MINE"},
            "MINE*,HF_TOKEN,HOME,CUDA_VISIBLE_DEVICES": {"MINE", "MINE_2", "HF_TOKEN", "HOME"},
            "*": {"MINE", "AUTHOR", "MINE_2"},
            "-MINE*": {"AUTHOR"},
            "-AUTHOR,-HF_TOKEN": {"MINE", "MINE_2"},
        }.items():
            with self.subTest(choice):
                self.assertEqual(set(environment_for_nodes(HERE, choice)), sent)
                # The option of a run, which is no variable of the user's.
                of_run = environment_for_nodes({**HERE, DEVICES_OF_RUN: "cpu"}, choice)
                self.assertEqual(of_run.get(DEVICES_OF_RUN), "cpu")
        self.assertEqual(
            withheld_variables(HERE, "MINE") & {"HF_TOKEN", "AUTHOR", "HOME", "MINE"}, {"HF_TOKEN", "AUTHOR"}
        )

    def test_what_is_said(self):
        for choice, said in {
            "": ["AWS_SECRET_ACCESS_KEY, HF_TOKEN"],
            "MINE": [],
            "HF_TOKEN,NONE": ["not set here: NONE"],
            "*": ["AWS_SECRET_ACCESS_KEY, HF_TOKEN"],
            "-HF*": ["AWS_SECRET_ACCESS_KEY"],
        }.items():
            with self.subTest(choice):
                notes = notes_on_environment(HERE, choice)
                self.assertEqual(
                    [note.endswith(end) for note, end in zip(notes, said, strict=True)], [True] * len(said)
                )


def connect(nodes=None):
    empty = dict.fromkeys(("folder", "archive", "root", "digest", "setup"), "")
    return Connect(Wish("host:1", nodes, None, None), environ={}, path=(), **empty)


class NodeWithoutRay:
    """Stands in for HeldNode: a thread of the bridge serves it until the test lets it leave."""

    def __init__(self, seen, room, serial):
        self.seen, self.serial, self.state = seen, serial, HeldState.STARTS
        self._threads, self._errors = queue.SimpleQueue(), queue.SimpleQueue()

    def is_reserved(self, seconds):
        return True

    def serve(self):
        self._threads.put(threading.current_thread())
        error = self._errors.get()
        if error is not None:
            raise error

    def leave(self, error=None):
        """Let its agent end, by this error or in order, and wait until the bridge has it no more."""
        self._errors.put(error)
        self._threads.get(timeout=60).join(60)

    def end(self):
        pass

    def close_stream(self):
        pass


class TestNodesOfBridge(unittest.TestCase):
    """What the bridge makes of what Ray says about nodes; no Ray is needed."""

    TWO = (("a" * 12, "one", "10.0.0.1", {"CPU": 8.0, "GPU": 2.0}), ("b" * 12, "two", "10.0.0.2", {"CPU": 8.0}))

    def names(self, *nodes):
        keys = ("NodeID", "NodeManagerHostname", "NodeManagerAddress", "Resources")
        return sorted(RayView(None).name([dict(zip(keys, node, strict=True)) for node in nodes]).values())

    def test_names(self):
        (a, host, address, has), b = self.TWO
        self.assertEqual(self.names(*self.TWO), ["one", "two"])
        self.assertEqual(self.names((a, host, address, has), (b[0], host, *b[2:])), ["10.0.0.1", "10.0.0.2"])
        self.assertEqual(
            self.names((a, host, address, has), (b[0], host, address, has)), ["10.0.0.1-aaaaaa", "10.0.0.1-bbbbbb"]
        )

    def choose(self, *nodes, held=None, alone=None, begun=False, **wish):
        """`nodes`: the name, the whole room and the free room of each."""
        chosen = Wish(**{"address": "host:1", "nodes": None, "gpus": None, "cpus": None, **wish})
        seen = [
            SeenNode(name, name, Room(*total), Room(*free), frozenset({f"10.0.0.{name}", f"zone={name}"}))
            for name, total, free in nodes
        ]
        choice = choose_nodes(chosen, seen, held or {}, alone or {}, begun)
        return "".join(node.name for node in choice.take), choice

    FREE = (("a", (8, 2), (8, 2)), ("b", (8, 0), (8, 0)), ("c", (4, 4), (4, 4)))
    BUSY = (("a", (8, 2), (0, 0)), ("b", (8, 0), (8, 0)), ("c", (4, 4), (0, 4)))
    JOINED, STARTS, ENDS = HeldState.JOINED, HeldState.STARTS, HeldState.ENDS

    def test_which_nodes_are_taken(self):
        for nodes, more, taken, said in (
            (self.FREE, {}, "abc", "nodes that start: a, b, c"),
            (self.FREE, {"nodes": 2}, "ac", "nodes that start: a, c"),  # those with most
            (self.FREE, {"nodes": 3}, "abc", ""),
            (self.FREE, {"gpus": 2}, "ac", ""),
            (self.FREE, {"gpus": 0, "nodes": 1}, "c", ""),
            (self.BUSY, {}, "b", ""),
            (
                self.BUSY,
                {"nodes": 2},
                "",
                "2 nodes (--cluster-nodes) with a CPU each, all at once: 1 of the cluster's 3 have",
            ),
            (self.BUSY, {"nodes": 2}, "", "that free, and others use a, c"),
            (self.BUSY, {"gpus": 1}, "", "1 GPUs and a CPU on one of 3 nodes, which others use"),
            (self.FREE, {"held": {"a": self.JOINED}, "begun": True}, "bc", ""),
            (self.FREE, {"held": dict.fromkeys("abc", self.JOINED), "begun": True}, "", ""),
            (self.FREE, {"held": {"a": self.JOINED, "b": self.STARTS}, "nodes": 2, "begun": True}, "", "that start: b"),
            (self.FREE, {"held": {"a": self.JOINED, "c": self.ENDS}, "nodes": 2, "begun": True}, "b", ""),  # c was lost
            (self.BUSY, {"held": {"a": self.JOINED}, "nodes": 3, "begun": True}, "b", ""),  # it has begun with three
            (self.FREE, {"alone": {"a": "why"}}, "bc", ""),
            (self.FREE, {"alone": {"a": "why"}, "nodes": 2}, "bc", ""),
            (self.FREE, {"only": ("a,b",)}, "ab", ""),
            (self.FREE, {"only": ("zone=c", "10.0.0.a")}, "ac", ""),
            (self.FREE, {"exclude": ("z*=a", "b")}, "c", ""),
            (self.FREE, {"only": ("a", "b"), "exclude": ("b",)}, "a", ""),
        ):
            with self.subTest(**more, busy=nodes is self.BUSY):
                found, choice = self.choose(*nodes, **more)
                self.assertEqual(
                    (found, choice.cannot, choice.infeasible, choice.gives_back), (taken, "", False, False)
                )
                self.assertIn(said, choice.waits_for)

    def test_all_nodes_or_none(self):
        """One of those that were reserved together is lost before the run has begun, and others use the third."""
        found, choice = self.choose(*self.BUSY, nodes=2, held={"b": self.JOINED})
        self.assertEqual((found, choice.gives_back), ("", True))
        self.assertIn("others use a, c", choice.waits_for)  # not what the run has itself

    def test_when_only_more_nodes_help(self):
        for wish, said in (
            ({"gpus": 5}, "5 GPUs and a CPU; no node of the cluster at host:1 has that (INFEASIBLE, unless"),
            ({"nodes": 4}, "4 nodes with a CPU; only 3 of the nodes of the cluster at host:1 has that"),
            ({"nodes": 3, "gpus": 2}, "3 nodes with 2 GPUs and a CPU; only 2 of the nodes"),
        ):
            with self.subTest(**wish):
                found, choice = self.choose(*self.FREE, **wish)
                self.assertEqual((found, choice.cannot, choice.infeasible), ("", "", True))
                self.assertIn(said, choice.waits_for)
                self.assertIn("b has 0 GPUs and 8 CPUs", choice.waits_for)

    def test_when_nothing_helps(self):
        for more, said in (
            ({"only": ("x",)}, "cluster.only and cluster.not leave none of the nodes of the cluster: a, b, c"),
            ({"alone": dict.fromkeys("abc", "node a: no memory")}, "node a: no memory"),
            ({"alone": {"a": "node a: x", "b": "node b: y"}, "nodes": 2}, "node a: x\nnode b: y"),
            ({"alone": {"a": "node a: x"}, "nodes": 3, "held": {"b": self.STARTS, "c": self.STARTS}}, "node a: x"),
        ):
            with self.subTest(**more):
                self.assertEqual(self.choose(*self.FREE, **more)[1].cannot, said)
                self.assertEqual(self.choose(*self.FREE, **{**more, "begun": True})[1].cannot, "")

    def test_how_much_of_a_node(self):
        for wish, room in (
            ({}, (8, 2)),
            ({"cpus": 3}, (3, 2)),
            ({"cpus": 9}, (8, 2)),
            ({"cpus": 1, "gpus": 1}, (1, 1)),
        ):
            chosen = Wish(**{"address": "", "nodes": None, "gpus": None, "cpus": None, **wish})
            self.assertEqual(chosen.part_of(Room(8, 2)), room)

    def looking(self, nodes=None):
        """A bridge that sees the nodes of a dictionary, takes them without Ray, and notes what it sends."""
        self.sent, self.seen = [], dict.fromkeys("abc", Room(2, 0))
        channel = types.SimpleNamespace(send=lambda message, *fds: self.sent.append(message))
        view = types.SimpleNamespace(
            look=lambda: [SeenNode(name, name, room, room) for name, room in self.seen.items()]
        )
        bridge = Bridge(channel, connect(nodes), None, view, NodeWithoutRay)
        self.addCleanup(lambda: [held.leave() for held in list(bridge.held.values())])
        bridge.look()
        return bridge

    def test_one_of_the_wanted_nodes_fails(self):
        """Before all have joined, the run cannot begin if the others do not suffice; later it goes on."""
        for joined, cannot in ("", True), ("a", True), ("abc", False):
            with self.subTest(joined=joined):
                bridge = self.looking(nodes=3)
                for name in joined:
                    bridge.held[name].state = HeldState.JOINED
                bridge.look()
                bridge.held["b"].leave(UnfitNode("no compiler"))
                bridge.look()
                said = [message.why for message in self.sent if isinstance(message, CannotConnect)]
                self.assertEqual(said, ["node b cannot run tests: no compiler"] if cannot else [])
                self.assertEqual(sorted(bridge.held), ["a", "c"])  # b is left alone

    def test_which_losses_are_tried_again(self):
        actor_died = type("ActorDiedError", (Exception,), {})
        for error, left_alone in (UnfitNode("x"), 1), (EOFError("x"), 2), (actor_died(), 2), (ValueError(), 1):
            with self.subTest(error=error):
                bridge, losses = self.looking(), 0
                while "a" in bridge.held:
                    bridge.held["a"].leave(error)
                    losses += 1
                    bridge.look()
                self.assertEqual(losses, left_alone)

    def test_no_unit_waits(self):
        """What the run gives back it does not take again; a node that joins the cluster is taken once."""
        bridge = self.looking()
        bridge.on_message(TakeMore(False))
        bridge.held["a"].leave()
        self.seen["new"] = Room(2, 0)
        bridge.look()
        self.assertEqual(sorted(bridge.held), ["b", "c", "new"])
        bridge.held["new"].leave()
        bridge.look()
        self.assertEqual(sorted(bridge.held), ["b", "c"])
        bridge.on_message(TakeMore(True))
        bridge.look()
        self.assertEqual(sorted(bridge.held), ["a", "b", "c", "new"])

    def test_what_ray_says_when_something_is_full(self):
        for kind, said in {
            "OutOfMemoryError": "Ray ended its actor, because the node is out of memory",
            "ObjectStoreFullError": "the object store of Ray has no room for the project: use cluster.root",
            "OutOfDiskError": "the object store of Ray has no room for the project: use cluster.root",
        }.items():
            error = type(kind, (Exception,), {})("details")
            self.assertIn(said, describe_error(error))
            of_actor = type(f"RayTaskError({kind})", (Exception,), {"cause": error})
            self.assertIn(said, describe_error(of_actor("\x1b[36mray::AgentActor.start()")))
        self.assertEqual(describe_error(ValueError("\x1b[36mray\x1b[39m")), "ValueError: ray")

    def test_no_cluster_on_this_machine(self):
        error = ConnectionError("Could not find any running Ray instance. Please specify the one")
        self.assertEqual(describe_error(error), "none runs on this machine, and RAY_ADDRESS names none")


# Says that three agents have joined, and ends: at once, or its connections one after the other.
DIES = subject(__file__, "dying_bridge.py")


class TestBridgeDies(unittest.TestCase):
    """The stand-in for a bridge ends while three nodes start; no Ray is needed."""

    def test_in_every_order(self):
        for order in "at once", "channel first", "streams first":
            with (
                self.subTest(order),
                tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_") as folder,
                mock.patch.object(ray_launcher, "BRIDGE", ("-c", DIES.replace('"at once"', repr(order), 1))),
                mock.patch.object(ray_launcher.importlib.util, "find_spec", lambda name: name),
            ):
                request = connect()
                log = Path(folder, "log")
                launcher = ray_launcher.RayLauncher(request, prepare_for(Path(folder)), log)
                with ClusterSite(launcher, NodeLeases(), 60.0, lambda text: None) as place:
                    log.write_text("a line that Ray has logged")
                    with ends_within(20):
                        while len(place.nodes.troubles.lost) < 3:
                            place.loop.step()
                    said = "the process that speaks with Ray was killed by SIGKILL (out of memory?)"
                    self.assertEqual(
                        sorted(place.nodes.troubles.lost), [f"node {name} was lost: {said}" for name in "abc"]
                    )
                    with self.assertRaisesRegex(ClusterError, "the process that speaks with Ray was killed"):
                        place.wait_for_nodes()
                    self.assertFalse(place.wait_for_more())


@contextlib.contextmanager
def ends_within(seconds):
    """A loop that never ends is an error, and no hang of this file."""

    def fail(*_):
        raise AssertionError(f"it has not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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
        shipment.write_tar(shipment.choose_files(root), root.with_suffix(".tar"))
        return root.with_suffix(".tar").read_bytes()

    def test_the_key(self):
        key = ray_actor.key_of(self.pack("one"))
        self.assertEqual(key, ray_actor.key_of(self.pack("another")))
        self.assertNotEqual(key, ray_actor.key_of(self.pack("text", text="x = 2\n")))
        self.assertNotEqual(key, ray_actor.key_of(self.pack("mode", mode=0o755)))

    def test_a_file_that_goes_while_the_project_is_packed(self):
        """As another run of the same checkout may remove its own."""
        root, archive = self.folder / "root", self.folder / "archive.tar"
        root.mkdir()
        for name in "gone", "b.sh":
            (root / name).touch()
        chosen = shipment.choose_files(root)
        (root / "gone").unlink()
        shipment.write_tar(chosen, archive)
        with tarfile.open(archive) as tar:
            self.assertEqual(tar.getnames(), ["b.sh"])

    def test_everything_is_sent_or_named(self):
        """Repositories in repositories, empty and ignored folders, links; files that are named are sent in any case."""
        settings = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "protocol.file.allow=always")

        def git(folder, *words):
            subprocess.run(["git", "-C", folder, *settings, *words], check=True, capture_output=True)

        library, root = self.folder / "library", self.folder / "root"
        for folder, name in (library, "in_library.py"), (root, "a.py"), (root / "nested", "in_nested.py"):
            folder.mkdir()
            git(folder, "init", "-q")
            (folder / name).touch()
            git(folder, "add", name) if folder != root / "nested" else None
        git(library, "commit", "-qm", "x")
        git(root, "submodule", "add", str(library), "module")
        (root / "module" / "new.py").touch()
        for name in "empty/in_empty", "ignored/pack", "new/empty":
            (root / name).mkdir(parents=True)
        files = ("ignored/test_i.py", "ignored/pack/x.py", "ignored/other.py", "new/n.py", "x.log", "b.so", "a.pyc")
        for name in files:
            (root / name).touch()
        (root / "link").symlink_to("a.py")
        (root / "out").symlink_to(self.folder)
        (root / ".gitignore").write_text("ignored\n*.log\n*.so\n*.pyc\n")
        sent = shipment.choose_files(root, ["ignored/test_i.py", "ignored/pack"])
        names = {
            *(".gitignore", ".gitmodules", "a.py", "link", "out", "module/in_library.py", "module/new.py"),
            *(
                "nested/in_nested.py",
                "new/n.py",
                "new/empty",
                "empty/in_empty",
                "ignored/test_i.py",
                "ignored/pack/x.py",
            ),
        }
        self.assertEqual(set(sent.files), names)
        self.assertEqual(set(sent.left_out), {"ignored/", "x.log", "b.so", "a.pyc", "out"})
        compiled, ignored, others = sent.warnings
        self.assertIn("compiled files that git ignores are not sent to the nodes: b.so", compiled)
        self.assertIn(
            "what git ignores is not sent to the nodes: ignored/, x.log; --cluster with --dry-run lists all", ignored
        )
        self.assertIn("not sent to the nodes: out (only as a link, which leads out of the project)", others)
        self.assertIn("not sent: x.log (git ignores it)", sent.describe())
        shipment.write_tar(sent, self.folder / "sent.tar")
        ray_actor._unpack((self.folder / "sent.tar").read_bytes(), str(self.folder / "node"), {"a.py": 10**18 + 1})
        self.assertTrue((self.folder / "node" / "empty" / "in_empty").is_dir())
        self.assertEqual((self.folder / "node" / "a.py").stat().st_mtime_ns, 10**18 + 1)
        with tarfile.open(self.folder / "sent.tar") as archive:
            self.assertEqual(shipment.sent_file(archive, "a.py"), b"")
            self.assertIsNone(shipment.sent_file(archive, "x.log"))
        (root / "ignored" / "sub").mkdir()
        inside = shipment.choose_files(root / "ignored")  # the project is in an ignored folder: git lists nothing
        self.assertEqual(set(inside.files), {"test_i.py", "other.py", "pack/x.py", "sub"})

    def test_entries_of_pythonpath(self):
        root, cwd = Path("/p/root"), Path("/p/root/sub")
        text = os.pathsep.join(
            ["/p/root/lib", "rel", "../up", "/p/root", "/elsewhere", "/p/root2", "", sys.prefix + "/x"]
        )
        self.assertEqual(
            shipment.split_path(text, root, cwd), (["lib", "sub/rel", "up", "."], ["/elsewhere", "/p/root2"])
        )

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
        os.utime(self.folder / f"{keys[2]}.tar", (1, 1))
        self.assertEqual(ray_actor.forget_archives(base, 4, 3600.0), [f"{base}/{keys[2]}.tar"])
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
        project = ProjectStore(ray, str(self.folder / "project.tar"))
        node = lambda has: types.SimpleNamespace(has=types.SimpleNamespace(remote=lambda key: has))  # noqa: E731
        self.assertIsNone(project.for_node(node(True)))
        self.assertEqual(puts, [])
        for _ in range(2):
            self.assertEqual(project.for_node(node(False)), ("in store", b"project"))
        self.assertEqual(puts, [b"project"])


if __name__ == "__main__":
    run_tests()
