"""The table of dispatchers."""
from __future__ import annotations

import torch

from ...config import ModelConfig, MoEConfig
from ...parallel import ParallelContext
from .allgather import AllGatherDispatcher
from .alltoall import AllToAllDispatcher
from .deepep import DeepEPDispatcher, check_use, import_package
from .hybridep import HybridEPDispatcher
from .interface import Dispatcher
from .roomy import RoomyDispatcher

# --moe-token-dispatcher-type: class. Those of the second table take deep_ep and find in it the class named.
PLAIN = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}
BY_DEEP_EP = {"deepep": (DeepEPDispatcher, "Buffer"), "hybridep": (HybridEPDispatcher, "HybridEPBuffer")}


def build_dispatcher(moe: MoEConfig, context: ParallelContext, config: ModelConfig, dtype: torch.dtype) -> Dispatcher:
    """The dispatcher that the flags name, for all layers of a model; ValueError where it cannot work here. It is never another."""
    name = moe.dispatcher
    # What the host is spared with a bound on the tokens; checks_moe refuses it for the others.
    bound = {} if moe.moe_max_tokens_per_rank is None else {"max_tokens": moe.moe_max_tokens_per_rank}
    if name == "alltoall" and bound and context.ep.size * context.etp.size > 1:
        return RoomyDispatcher(context, config.num_experts, **bound)
    if name in PLAIN:
        return PLAIN[name](context, config.num_experts, **bound)
    dispatcher, attribute = BY_DEEP_EP[name]
    check_use(name, context, dtype)
    package = import_package(name, attribute, context)
    return dispatcher(context, config.num_experts, hidden_size=config.hidden_size, dtype=dtype, package=package, **bound)
