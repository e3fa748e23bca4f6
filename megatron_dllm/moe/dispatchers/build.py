"""The table of dispatchers."""
from __future__ import annotations

from ...config import MoEConfig
from ...parallel import ParallelContext
from .allgather import AllGatherDispatcher
from .alltoall import AllToAllDispatcher
from .interface import Dispatcher


def build_dispatcher(moe: MoEConfig, context: ParallelContext, num_experts: int) -> Dispatcher:
    """The dispatcher that --moe-token-dispatcher-type names."""
    return DISPATCHERS[moe.moe_token_dispatcher_type](context, num_experts)


DISPATCHERS = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}
