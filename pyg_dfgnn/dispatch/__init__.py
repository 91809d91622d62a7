"""Rules: from a problem to the kernels that run, each with its reasons. Imports neither CuPy nor kernels."""
