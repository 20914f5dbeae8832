"""Triton kernels, one file per op, for CUDA and ROCm tensors: the jitted kernels and the functions that launch them.

Nothing here registers an op, checks a shape or knows autograd: that is `compgen_fast.ops`, which checks the arguments
before they arrive. Importing a kernel file imports Triton, so import it only when a kernel is about to run.
"""
