"""A run on several machines: agents on the nodes of a cluster, and one queue here."""
