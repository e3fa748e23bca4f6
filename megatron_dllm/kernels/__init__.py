"""Triton kernels for CUDA tensors, a file each, beside plain torch (`reference`). Only that file and `launch` import without Triton."""
