"""Gradients summed over data-parallel ranks, bucket by bucket, and state shared out over them."""

from .buckets import GradientBuckets, Piece
from .finalize import count_zeros, finalize_gradients, gradient_norm

__all__ = ["GradientBuckets", "Piece", "count_zeros", "finalize_gradients", "gradient_norm"]
