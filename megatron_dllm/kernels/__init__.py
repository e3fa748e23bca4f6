"""Triton kernels for CUDA tensors, a file each, beside plain torch (`reference`). What imports without Triton: the
references, `launch` and `attention_tiles`."""
