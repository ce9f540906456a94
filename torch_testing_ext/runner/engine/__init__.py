"""Running the units of a plan, on this machine or on the nodes of a cluster."""
