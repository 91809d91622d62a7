"""Source text to running kernel: assembly of the CUDA text, compilation, launch, and the DLPack bridge.

The only room that imports CuPy, and only when something is compiled, launched or exchanged.
"""
