"""transformers' DiffusionGemma on the same weights, tokens and draws as ours: its training step as its users would write it."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

from megatron_dllm.config import ModelConfig
from megatron_dllm.models.diffusion_gemma.huggingface import links
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.transformer.visibility import CLEAN

from .workload import Workload, gradient_dtypes

VISION = dict(model_type="gemma4_vision", hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
              num_key_value_heads=2, head_dim=32)


def transformers_model(ours: DiffusionGemma) -> DiffusionGemmaForBlockDiffusion:
    """Its model whose text parameters share the memory of ours (it keeps gate and up apart: two views of one tensor)."""
    model = untied_model(ours.config, ours.dtype, ours.embedding.weight.device)
    share_weights(ours, model)
    return model.train()


def untied_model(ours: ModelConfig, dtype: torch.dtype, device: torch.device) -> DiffusionGemmaForBlockDiffusion:
    """Its model with weights of its own.

    It attends by SDPA and multiplies experts by grouped_mm, its fastest choices that run without compilation.
    """
    config = DiffusionGemmaConfig(text_config=ours.to_transformers()["text_config"], vision_config=VISION,
                                  canvas_length=ours.canvas_length)
    config._attn_implementation = config.text_config._attn_implementation = "sdpa"
    config._experts_implementation = config.text_config._experts_implementation = "grouped_mm"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = DiffusionGemmaForBlockDiffusion(config)
    torch.set_default_dtype(before)
    return model


@torch.no_grad()
def share_weights(ours: DiffusionGemma, theirs: DiffusionGemmaForBlockDiffusion) -> None:
    """Let each of their parameters be a view of ours. AssertionError if one of another shape or a name is left over."""
    source = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    target = {**dict(theirs.named_parameters(remove_duplicate=False)), **dict(theirs.named_buffers(remove_duplicate=False))}
    for link in links(ours.config):
        tensor = source[link.ours]
        for part, name in enumerate(link.theirs):
            view = tensor[part] if link.kind == "parts" else tensor.flatten(1, 2) if link.kind == "fused" else tensor
            assert target[name].numel() == view.numel(), (name, target[name].shape, view.shape)
            target[name].data = view.detach().view(target[name].shape)


class TransformersStep:
    """One microbatch: the encoder over the clean tokens, a draft, the self-conditioned canvas, both losses, the backward.

    gradients: the dtypes of the gradients of the last call.
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, config: ModelConfig, workload: Workload):
        device = model.device
        streams, batch, length = workload.streams, workload.batch, config.canvas_length
        assert len(streams.canvas) == batch * length, "this peer decodes one canvas of each row"
        assert streams.self_conditioned.all(), "this peer decodes every canvas twice"

        def rows(values) -> Tensor:
            return torch.as_tensor(values, device=device).view(batch, -1)

        self.model, self.config, self.gradients = model, config, ""
        self.clean, self.canvas = rows(streams.clean.tokens), rows(streams.canvas.tokens)
        self.positions, self.targets = rows(streams.canvas.positions), rows(streams.canvas.targets)
        first = self.positions[:, :1]
        key = torch.arange(workload.seq_length, device=device)
        self.masks = {"full_attention": self._mask(key < first), "sliding_attention": self._mask(
            (key < first) & (key >= first - (config.window_size - 1)))}
        assert (streams.visibility.canvas_id[:len(streams.clean)] == CLEAN).all()

    def _mask(self, prefix: Tensor) -> Tensor:
        """Additive [B, 1, C, S + C]: a prefix [B, S] of the row, then the whole canvas."""
        batch, canvas = self.canvas.shape
        seen = torch.cat([prefix, prefix.new_ones(batch, canvas)], 1)[:, None, None].expand(-1, 1, canvas, -1)
        dtype = self.model.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def losses(self) -> Tensor:
        """Autoregressive plus diffusion loss, plain means of the cross entropy."""
        model, cap = self.model, self.config.final_logit_softcapping
        encoded = model.model.encoder(input_ids=self.clean, past_key_values=DynamicCache())
        logits = self._capped(encoded.last_hidden_state[:, :-1], cap)
        loss = F.cross_entropy(logits.flatten(0, 1), self.clean[:, 1:].reshape(-1))
        del logits
        decode = {"decoder_input_ids": self.canvas, "past_key_values": encoded.past_key_values, "decoder_attention_mask": self.masks,
                  "decoder_position_ids": self.positions}
        with torch.no_grad():
            draft = self._capped(model.model.decoder(**decode).last_hidden_state, cap)
        hidden = model.model.decoder(**decode, self_conditioning_logits=draft).last_hidden_state
        return loss + F.cross_entropy(self._capped(hidden, cap).flatten(0, 1), self.targets.reshape(-1))

    def _capped(self, hidden: Tensor, cap: float) -> Tensor:
        return torch.tanh(self.model.lm_head(hidden).float() / cap) * cap

    def __call__(self) -> float:
        """Forward and backward; gradients are dropped."""
        loss = self.losses()
        loss.backward()
        value = loss.item()
        self.gradients = gradient_dtypes(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = None
        return value
