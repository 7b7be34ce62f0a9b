"""Groups on several nodes: which ranks share one, what the steps of a collective are, and who makes them."""
