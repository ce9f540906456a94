import os
import sys
import time

from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext.runner.cluster.bridge_messages import BridgeWaits, NodeJoined, RayImported, ToBridge

channel = Channel.on(int(sys.argv[1]), ToBridge)
channel.receive()
channel.send(RayImported())
channel.send(BridgeWaits(""))
streams = []
for number, name in enumerate("abc"):
    ours, theirs = socket_pair()
    streams.append(ours)
    channel.send(NodeJoined(name, number, "/", 1, ()), theirs.fileno())
    theirs.close()
order = "at once"
if order == "channel first":
    channel.close()
    time.sleep(0.2)
elif order == "streams first":
    for stream in streams:
        stream.close()
        time.sleep(0.1)
os.kill(os.getpid(), 9)
