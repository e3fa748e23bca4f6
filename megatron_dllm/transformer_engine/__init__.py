"""The package Transformer Engine behind the model's own layers (--transformer-impl transformer_engine)."""

from .engine import Engine, load_engine
from .install import install
from .table import Choice, choices

__all__ = ["Choice", "Engine", "choices", "install", "load_engine"]
