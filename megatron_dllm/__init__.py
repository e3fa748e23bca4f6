"""Training of block-diffusion mixture-of-experts language models, DiffusionGemma first."""

__version__ = "0.1.0"
