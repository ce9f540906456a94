"""From the graph of the local program to a data-parallel one, and to something that runs."""
