"""The reference of the suites: a tiny random DiffusionGemma of transformers, and its generate with draws injected and every step noted."""
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler, EntropyBoundSamplerConfig
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

from megatron_dllm.config import GenerationConfig
from megatron_dllm.diffusion.sampler import Draws, Unrecorded
from megatron_dllm.models.diffusion_gemma.build import load_transformers
from megatron_dllm.models.diffusion_gemma.inference import Session
from megatron_dllm.parallel import ParallelContext

CANVAS_LENGTH = 16
PAD_ID = 0
SHARPNESS = 6.0  # multiplies the final norm, so that logits reach the soft cap's bend and some tokens are sure
TEXT_CONFIG = dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    global_head_dim=32, num_global_key_value_heads=1, sliding_window=24, num_experts=8, top_k_experts=2, moe_intermediate_size=32,
    use_bidirectional_attention="vision", pad_token_id=PAD_ID)
# Small enough that a step does not amplify rounding: a random model with a strong self-conditioning signal is chaotic, and after some ten
# steps nothing could be compared.
WEIGHT_STD = {"embed_tokens": 0.15, "self_conditioning": 0.03, "router": 1.0}
VISION_CONFIG = dict(model_type="gemma4_vision", hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, head_dim=32)


def tiny_oracle(seed: int) -> DiffusionGemmaForBlockDiffusion:
    """A random DiffusionGemma in fp32 whose norms, scales and layer scalars (of both passes) all differ from 1 and from each other."""
    config = DiffusionGemmaConfig(text_config=dict(TEXT_CONFIG), vision_config=dict(VISION_CONFIG), canvas_length=CANVAS_LENGTH)
    config._attn_implementation = config.text_config._attn_implementation = "sdpa"
    config._experts_implementation = config.text_config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)

    def spread(tensor: Tensor, low: float, high: float) -> None:
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in model.model.decoder.named_parameters():
            if parameter.ndim > 1:
                std = next((std for part, std in WEIGHT_STD.items() if part in name), 0.05)
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            elif "q_norm" in name or "k_norm" in name:
                spread(parameter, 0.3, 0.7)
            else:  # other norms, router.scale, router.per_expert_scale
                spread(parameter, 0.6, 1.4)
        for stack in (model.model.decoder, model.model.encoder.language_model):
            for layer in stack.layers:
                spread(layer.layer_scalar, 0.7, 1.3)
        model.model.decoder.norm.weight.mul_(SHARPNESS)
    return model


class TransformersDenoiser(Unrecorded):
    """`Denoiser` over transformers' own modules: a cache for each row, rows run one by one."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, num_rows: int):
        self.model, self.num_rows = model, num_rows
        self.vocab_size = model.config.text_config.vocab_size
        self.canvas_length = model.config.canvas_length
        self.max_positions = model.config.text_config.max_position_embeddings
        self.dtype, self.device = model.dtype, model.device
        self.caches = [DynamicCache(config=model.config.text_config) for _ in range(num_rows)]

    def encode(self, tokens: Sequence[Tensor]) -> None:
        for cache, row_tokens in zip(self.caches, tokens, strict=True):
            if len(row_tokens):
                self.model.model.encoder.language_model(input_ids=row_tokens[None], cache=cache)

    def denoise(self, canvas: Tensor, self_conditioning_logits: Tensor | None, rows: Tensor) -> Tensor:
        signals = [None] * len(rows) if self_conditioning_logits is None else self_conditioning_logits.split(1)
        outputs = [self.model(decoder_input_ids=ids, self_conditioning_logits=signal, cache=self.caches[row])
                   for ids, signal, row in zip(canvas.split(1), signals, rows.tolist(), strict=True)]
        return torch.cat([output.logits for output in outputs])


def our_session(model: DiffusionGemmaForBlockDiffusion, num_rows: int) -> Session:
    """`Denoiser` over this project's model with the weights of `model`, by way of an exported directory."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return Session(load_transformers(folder, ParallelContext.single(), torch.float32), num_rows)


@dataclass
class OracleTrace:
    """What transformers' generate did: for each canvas, for each step, tensors of the whole batch."""

    accepted: list[list[Tensor]] = field(default_factory=list)
    canvas: list[list[Tensor]] = field(default_factory=list)
    argmax: list[list[Tensor]] = field(default_factory=list)
    finished: list[list[Tensor]] = field(default_factory=list)
    tokens: Tensor | None = None
    tokens_per_forward: Tensor | None = None

    def steps(self) -> Tensor:
        """int64 [R, K]: the step at which each row's canvas finished, or all of them (rows that ended earlier go on in the oracle)."""
        return torch.stack([torch.stack(canvas).logical_not().sum(dim=0).add(1).clamp(max=len(canvas)) for canvas in self.finished], dim=1)


class InjectedSampler(EntropyBoundSampler):
    """transformers' sampler with our draws in place of torch.randint; notes what was accepted."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, config: GenerationConfig, draws: Draws, rows: Sequence[int]):
        super().__init__(EntropyBoundSamplerConfig(config.entropy_bound), model.config.canvas_length, model.config.text_config.vocab_size,
                         config.max_denoising_steps)
        self.draws, self.rows, self.trace = draws, rows, OracleTrace()
        self.canvas_index, self.step = -1, 0

    def initialize_canvas(self, batch_size, device):
        if self.trace.accepted and self.step < len(self.trace.accepted[-1]):  # called from renoise_canvas
            self.step += 1
            return self.draws.fresh_tokens(self.rows, self.canvas_index, self.step - 1)
        self.canvas_index, self.step = self.canvas_index + 1, 0
        for steps in (self.trace.accepted, self.trace.canvas, self.trace.argmax, self.trace.finished):
            steps.append([])
        return self.draws.initial_canvas(self.rows, self.canvas_index)

    def accept_canvas(self, current_canvas, denoiser_canvas, logits, cur_step):
        accepted = super().accept_canvas(current_canvas, denoiser_canvas, logits, cur_step)
        self.trace.accepted[-1].append(self.accepted_token_mask.clone())
        return accepted

    def multinomial(self, probabilities: Tensor, num_samples: int) -> Tensor:
        """Replaces torch.multinomial: inverse cumulative in float64 by numpy, apart from ours."""
        uniforms = self.draws.uniforms(self.rows, self.canvas_index, self.step).flatten().numpy()
        cumulative = np.cumsum(probabilities.double().numpy(), axis=-1)
        picks = [np.searchsorted(row, u * row[-1], side="right") for row, u in zip(cumulative, uniforms, strict=True)]
        return torch.tensor(picks)[:, None]


def oracle_generate(
    model: DiffusionGemmaForBlockDiffusion, prompts: Sequence[Sequence[int]], config: GenerationConfig, eos_ids: Sequence[int], draws: Draws
) -> OracleTrace:
    """Run transformers' generate on left-padded prompts with `draws` injected; everything it did, step by step."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[PAD_ID] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    attention_mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampler = InjectedSampler(model, config, draws, range(len(prompts)))
    trace, plain_step = sampler.trace, model._denoising_step

    def traced_step(**inputs):
        result = plain_step(**inputs)
        canvas, argmax, _, finished = result
        for steps, value in ((trace.canvas, canvas), (trace.argmax, argmax), (trace.finished, finished)):
            steps[-1].append(value.clone())
        return result

    with (mock.patch.object(model, "_prepare_sampler", lambda _: sampler), mock.patch.object(model, "_denoising_step", traced_step),
          mock.patch("torch.multinomial", sampler.multinomial)):
        output = model.generate(
            input_ids, attention_mask=attention_mask, max_new_tokens=config.max_new_tokens, max_denoising_steps=config.max_denoising_steps,
            t_min=config.t_min, t_max=config.t_max, stability_threshold=config.stability_threshold, eos_token_id=list(eos_ids),
            confidence_threshold=config.confidence_threshold, pad_token_id=PAD_ID)
    trace.tokens, trace.tokens_per_forward = output.sequences[:, longest:], output.tokens_per_forward
    return trace
