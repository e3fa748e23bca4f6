"""Process groups: who we are, and what we say to each other."""

from .collectives import (
    all_to_all,
    gather_replicated_sequence,
    gather_sequence,
    scatter_sum_sequence,
    split_sequence,
    sum_grad_over,
    sum_over,
)
from .context import CommunicationLog, Group, ParallelContext
from .placement import Placement, place

__all__ = [
    "CommunicationLog",
    "Group",
    "ParallelContext",
    "Placement",
    "all_to_all",
    "gather_replicated_sequence",
    "gather_sequence",
    "place",
    "scatter_sum_sequence",
    "split_sequence",
    "sum_grad_over",
    "sum_over",
]
