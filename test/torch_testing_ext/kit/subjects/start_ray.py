import os
import sys
import time

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="120", RAY_worker_niceness="0")
from ray.cluster_utils import Cluster

more = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20}
cluster = Cluster(
    initialize_head=True,
    head_node_args={"node_ip_address": "127.0.0.2", "temp_dir": sys.argv[1], "include_dashboard": False, **more},
)
cluster.add_node(node_ip_address="127.0.0.3", **more)
print(cluster.address, flush=True)
nodes = {}
for line in sys.stdin:
    command, address, *settings = line.split()
    if command == "add":
        environ = dict(setting.split("=") for setting in settings)
        os.environ.update(environ)
        nodes[address] = cluster.add_node(node_ip_address=address, **more)
        for name in environ:
            del os.environ[name]
    elif command == "remove":
        cluster.remove_node(nodes.pop(address))
    else:
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        deadline = int(time.time() * 1000) + 300_000
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        GcsClient(address=cluster.address).drain_node(nodes[address].node_id, reason, "a test", deadline)
    print("done", flush=True)
cluster.shutdown()
