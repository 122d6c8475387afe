"""Portable Triton kernels of InferPlane: plain functions on torch tensors, one module for each family."""
