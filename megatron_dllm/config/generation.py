"""The sampler's settings; the defaults are the release's."""

from dataclasses import dataclass

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Generation"""

    max_new_tokens: int = flag("Most tokens to generate, rounded up to whole canvases.", 256)
    max_denoising_steps: int = flag("Most steps that a canvas takes.", 48)
    entropy_bound: float = flag("Positions are accepted, surest first, while the entropies before them sum to at most this.", 0.1)
    t_min: float = flag("Temperature that the last step approaches.", 0.4)
    t_max: float = flag("Temperature of the first step.", 0.8)
    stability_threshold: int = flag("Steps that the best guess must stay the same before a canvas is done.", 1)
    confidence_threshold: float = flag("Mean entropy under which a canvas may be done.", 0.005)
