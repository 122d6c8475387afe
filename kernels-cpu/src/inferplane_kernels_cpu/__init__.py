"""CPU kernels of InferPlane: plain functions on torch tensors."""
