"""From a train step to one graph of the local program."""
