"""NeMo AutoModel's DiffusionGemma on the same weights, tokens and draws: it decodes the whole response, as its recipe does, and scores
one canvas of it, or all."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.diffusion_gemma.attention_mask import build_block_diffusion_training_mask
from nemo_automodel.components.models.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion
from torch import Tensor, nn
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

from megatron_dllm.config import ModelConfig
from megatron_dllm.models.diffusion_gemma.huggingface import links
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma

from .peers import VISION
from .workload import Workload, gradient_dtypes


def nemo_model(ours: DiffusionGemma) -> nn.Module:
    """Its model with copies of our weights (its experts are transposed)."""
    released = ours.config.to_transformers()
    config = DiffusionGemmaConfig(text_config=released["text_config"], vision_config=VISION, canvas_length=ours.config.canvas_length)
    on_gpu = ours.embedding.weight.is_cuda
    backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch_fp32", experts="torch_mm" if on_gpu else "torch",
                            dispatcher="torch", enable_hf_state_dict_adapter=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(ours.dtype)
    with torch.device(ours.embedding.weight.device):
        model = DiffusionGemmaForBlockDiffusion(config, backend=backend)
    torch.set_default_dtype(before)
    model = model.to(ours.embedding.weight.device).to(ours.dtype)
    copy_weights(ours, model)
    return model.train()


@torch.no_grad()
def copy_weights(ours: DiffusionGemma, theirs: nn.Module) -> None:
    """Fill its parameters from ours. KeyError if a name is not there."""
    source = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    target = {**dict(theirs.named_parameters(remove_duplicate=False)), **dict(theirs.named_buffers(remove_duplicate=False))}
    scales = {name.rsplit(".router", 1)[0]: tensor for name, tensor in source.items() if name.endswith("per_expert_scale")}
    for link in links(ours.config):
        tensor = source[link.ours]
        if link.ours.endswith("experts.gate_up"):
            target[_expert_name(link.ours, "gate_and_up_projs")].copy_(tensor.flatten(1, 2).transpose(1, 2))
        elif link.ours.endswith("experts.down"):
            scale = scales[link.ours.rsplit(".experts", 1)[0]].to(tensor.dtype)
            target[_expert_name(link.ours, "down_projs")].copy_((tensor * scale[:, None, None]).transpose(1, 2))
        elif not link.ours.endswith("per_expert_scale"):
            for part, name in enumerate(link.theirs):
                if name.startswith("model.encoder."):
                    continue  # its passes share a scalar
                value = tensor[part] if link.kind == "parts" else tensor
                name = name.replace("model.decoder.", "model.").replace(".router.", ".moe.gate.")
                target[name].copy_(value.view(target[name].shape))


def _expert_name(name: str, which: str) -> str:
    return f"model.layers.{name.split('.')[1]}.moe.experts.{which}"


class NemoStep:
    """One microbatch, forward and backward. gradients: the dtypes of the gradients of the last call."""

    def __init__(self, model: nn.Module, config: ModelConfig, workload: Workload):
        streams, batch, length = workload.streams, workload.batch, config.canvas_length
        device = next(model.parameters()).device

        def rows(values) -> Tensor:
            return torch.as_tensor(values, device=device).view(batch, -1)

        self.model, self.batch, self.gradients = model, batch, ""
        self.clean = rows(streams.clean.tokens)
        prompt = workload.seq_length // 2
        response = workload.seq_length - prompt
        place = rows(streams.canvas.positions) - prompt
        self.canvas = self.clean[:, prompt:].clone().scatter_(1, place, rows(streams.canvas.tokens))
        self.scored = torch.zeros_like(self.canvas, dtype=torch.bool).scatter_(1, place, torch.ones_like(place, dtype=torch.bool))
        self.positions = (prompt + torch.arange(response, device=device))[None].expand(batch, -1)
        self.targets = self.clean[:, prompt:][self.scored]
        full, sliding = build_block_diffusion_training_mask(
            prefix_lengths=torch.full((batch,), prompt, device=device), response_length=response, enc_len=workload.seq_length,
            block_size=length, sliding_window=config.window_size, device=device, dtype=next(model.parameters()).dtype)
        self.masks = {"full_attention": full, "sliding_attention": sliding}

    def __call__(self) -> float:
        """Autoregressive plus diffusion loss; gradients are dropped."""
        out = self.model(
            input_ids=self.clean, canvas_ids=self.canvas, decoder_attention_mask=self.masks, decoder_position_ids=self.positions,
            do_self_conditioning=torch.ones(self.batch, dtype=torch.bool, device=self.clean.device))
        loss = F.cross_entropy(out.encoder_logits[:, :-1].flatten(0, 1).float(), self.clean[:, 1:].reshape(-1))
        loss = loss + F.cross_entropy(out.logits[self.scored].float(), self.targets)
        del out
        loss.backward()
        value = loss.item()
        self.gradients = gradient_dtypes(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = None
        return value
