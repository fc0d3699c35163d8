"""A prefill node of several processes: rank 0 is the node for everybody else, and the others do what it says."""
