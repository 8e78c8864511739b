"""`batchgen bench`: standard workloads with random weights, so that two engines can be compared on the same work."""
