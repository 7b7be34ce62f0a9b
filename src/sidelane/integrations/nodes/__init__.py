"""Groups on several nodes: the ranks of each node, the steps of collectives, and the code that makes them."""
