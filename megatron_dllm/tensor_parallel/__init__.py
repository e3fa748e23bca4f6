"""Layers cut over the tensor-parallel ranks, and what is computed over a vocabulary cut over them."""

from .cross_entropy import CrossEntropy, linear_cross_entropy
from .embedding import VocabularyParallelEmbedding
from .gradients import sum_shared_gradients
from .initialization import Constant, Init, Initializer, make_parameter
from .linear import ColumnParallelLinear, LocalHeads, RowParallelLinear, column_layers, column_linear, local_heads, row_linear
from .shared_gradient import SharedWeight
from .soft_embedding import soft_embedding

__all__ = [
    "ColumnParallelLinear",
    "Constant",
    "CrossEntropy",
    "Init",
    "Initializer",
    "LocalHeads",
    "RowParallelLinear",
    "SharedWeight",
    "VocabularyParallelEmbedding",
    "column_layers",
    "column_linear",
    "linear_cross_entropy",
    "local_heads",
    "make_parameter",
    "row_linear",
    "soft_embedding",
    "sum_shared_gradients",
]
