"""Steps of programs on row domains: prepared on a graph, called with tensors."""
