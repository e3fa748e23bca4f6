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
from .context import CommunicationLog, Group, ParallelContext, Sent
from .failures import FirstFailure, FirstRankFirst, OtherRankFailed
from .initialize import close, create_context, initialize
from .main_gradient import MainGradient
from .placement import Placement, place
from .topology import Topology
from .watchdog import Watchdog

__all__ = [
    "CommunicationLog",
    "FirstFailure",
    "FirstRankFirst",
    "Group",
    "MainGradient",
    "OtherRankFailed",
    "ParallelContext",
    "Placement",
    "Sent",
    "Topology",
    "Watchdog",
    "all_to_all",
    "close",
    "create_context",
    "gather_replicated_sequence",
    "gather_sequence",
    "initialize",
    "place",
    "scatter_sum_sequence",
    "split_sequence",
    "sum_grad_over",
    "sum_over",
]
