"""The engine: runs the units of a plan, on this machine or on the nodes of a cluster, and sends events.

Imports `processes` and `scheduling`. It never imports a report: it sends events, and prints nothing.
"""
