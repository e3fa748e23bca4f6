"""Layers: norms, rotary, attention, MLP, block, recompute."""
