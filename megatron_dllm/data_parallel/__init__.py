"""Gradients summed over data-parallel ranks, bucket by bucket, and state shared out over them."""

from .buckets import GradientBuckets, Piece
from .finalize import GradientSums, finalize_gradients

__all__ = ["GradientBuckets", "GradientSums", "Piece", "finalize_gradients"]
