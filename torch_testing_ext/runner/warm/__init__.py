"""The warm server: a preloaded server that outlives a run, of which the preloaded server of each later run is a fork.

docs/contribute/warm.md has the guarantees. Never imports torch, but for `server_process`.
"""

from .warm_client import WarmProcess, WarmServer, find_server, stop_servers

__all__ = ["WarmProcess", "WarmServer", "find_server", "stop_servers"]
