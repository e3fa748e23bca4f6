"""Has the layers of a model computed by the package, as the table says."""
from __future__ import annotations

from torch import nn

from ..moe.experts import Experts
from ..tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding
from ..transformer.attention import SelfAttention
from ..transformer.gated_delta_net import GatedDeltaNet
from ..transformer.norms import RMSNorm
from .cross_entropy import engine_cross_entropy
from .engine import Engine
from .experts import grouped_product
from .linear import EngineLinear
from .norms import engine_rms_norm
from .rotary import EngineRotary


def install(model: nn.Module, engine: Engine) -> None:
    """Give layers their product: parameters, their names and what calls the layers stay as they are. bf16 models."""
    norm = engine_rms_norm()
    for module in _outside(model, GatedDeltaNet):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            flat = module.weight.flatten(0, -2)
            module.product = EngineLinear(engine, flat.shape[1], flat.shape[0])
        elif isinstance(module, RMSNorm):
            module.function = norm
        elif isinstance(module, Experts) and engine.grouped:
            shapes = [(weight[0].numel() // weight.shape[-1], weight.shape[-1]) for weight in (module.gate_up, module.down)]
            module.product = grouped_product(engine, len(module.down), shapes, module.down.device)
            module.by_kernels = False
        elif isinstance(module, SelfAttention) and engine.rotary:
            module.turn = EngineRotary(norm)
        elif isinstance(module, VocabularyParallelEmbedding) and engine.cross_entropy:
            module.logit_loss = engine_cross_entropy(engine)


def _outside(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """The modules of a model that are not in one of this kind."""
    inside = {part for module in model.modules() if isinstance(module, kind) for part in module.modules()}
    return [module for module in model.modules() if module not in inside]
