"""A run on several machines: agents on the nodes of a cluster, and one queue here.

Could be a product of its own: the rest of the runner imports `cluster_site` alone, and only for a run on a cluster. It
imports the runner's data, its scheduling, and the engine and processes that an agent runs on its node.
"""
