"""How many floating-point operations a training step needs, from the model's configuration and the batch's real token numbers.

Counted are matrix products (two operations a multiply-add) over real tokens: padding, norms, softmax, rotary and the optimizer are not.
Attention counts the (query, key) pairs that are visible, so a kernel that also computes masked pairs looks slower, as it should.

Legend: H hidden, V vocabulary, N examples, M canvases.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..config import ModelConfig, ObjectiveConfig
from ..diffusion.batch_plan import BatchPlan

Operations = dict[str, float]  # by part of the model: floats, as a step's count may pass 2^63


@dataclass(frozen=True)
class TokenCounts:
    """The real tokens of a global batch.

        clean             int64 [N]  clean tokens of each example, the EOS fill included
        canvas            int64 [M]  tokens of each scored canvas
        canvas_prefix     int64 [M]  clean tokens before each canvas
        self_conditioned  bool [M]   whether the canvas takes a draft pass first
        text_tokens       tokens of prompts and responses, without fill: what tokens per second counts
        encoder_targets, decoder_targets: tokens that the head scores for the two losses
    """

    clean: np.ndarray
    canvas: np.ndarray
    canvas_prefix: np.ndarray
    self_conditioned: np.ndarray
    text_tokens: int
    encoder_targets: int
    decoder_targets: int

    @classmethod
    def of(cls, plan: BatchPlan, objective: ObjectiveConfig) -> TokenCounts:
        examples = [example for rank in plan.microbatches for microbatch in rank for example in microbatch.examples]
        canvases = [(example, canvas) for example in examples for canvas in example.canvases]
        return cls(
            clean=np.array([example.fit.total for example in examples], np.int64),
            canvas=np.array([example.fit.canvas_length for example, _ in canvases], np.int64),
            canvas_prefix=np.array([example.canvas_start(canvas) for example, canvas in canvases], np.int64),
            self_conditioned=np.array([example.self_conditioned for example, _ in canvases], bool),
            text_tokens=sum(example.fit.prompt + example.fit.response for example in examples),
            encoder_targets=sum(example.num_pairs(objective) for example in examples) if objective.encoder_loss_weight else 0,
            decoder_targets=plan.denominators.decoder)


@dataclass(frozen=True)
class StepOperations:
    """Operations of one step over all devices, each by part.

        draft     forward of the draft passes, which have no backward
        forward   forward of everything with a gradient
        backward  input and weight gradients, as if every weight is trained: twice the forward, and once for the soft embedding, whose
                  probabilities are detached; beside adapters no weight gradients
        repeated  forward work done again in the backward, by --recompute-granularity and by the soft embedding (at most: it keeps the
                  probabilities of a few tokens)
    """

    draft: Operations
    forward: Operations
    backward: Operations
    repeated: Operations

    @property
    def model(self) -> float:
        """What the step needs: the MFU's numerator."""
        return float(sum(self.draft.values()) + sum(self.forward.values()) + sum(self.backward.values()))

    @property
    def hardware(self) -> float:
        """What is executed: `model` and the repeated work. Draft rows that are repeated beside clean tokens are not counted."""
        return self.model + float(sum(self.repeated.values()))


def causal_pairs(lengths: np.ndarray, window: int | None) -> int:
    """Visible (query, key) pairs of causal attention over sequences of these lengths; a query sees `window` keys, itself the last."""
    reach = lengths if window is None else np.minimum(lengths, window)
    # The first `reach` queries see 1, 2, ..., reach keys; the others `reach` each.
    return int(np.sum(reach * (reach + 1) // 2 + (lengths - reach) * reach))


def canvas_pairs(canvas: np.ndarray, prefix: np.ndarray, window: int | None) -> int:
    """Visible pairs of canvas queries: every query sees the whole canvas and the clean tokens before it, at most window - 1 of them."""
    before = prefix if window is None else np.minimum(prefix, window - 1)
    return int(np.sum(canvas * (canvas + before)))


def stack_operations(model: ModelConfig, *, tokens: int, full_pairs: int, sliding_pairs: int) -> Operations:
    """Forward operations of all layers over `tokens` tokens, with these attention pairs in a full and in a sliding layer."""
    hidden, topk = model.hidden_size, model.moe_router_topk
    projections = attention = 0
    for layer in range(model.num_layers):
        if layer in model.linear_layers:
            keys = model.linear_num_key_heads * model.linear_key_head_dim
            values = model.linear_num_value_heads * model.linear_value_head_dim
            projections += 2 * tokens * hidden * (2 * keys + 3 * values + 2 * model.linear_num_value_heads)
            # A token reads the state twice and adds to it once.
            attention += 6 * tokens * values * model.linear_key_head_dim
            continue
        heads, head_dim = model.num_attention_heads, model.head_dim(layer)
        # Full layers make values from the key projection.
        key_value = model.kv_heads(layer) * (1 if model.is_full(layer) else 2)
        projections += 2 * tokens * hidden * head_dim * (2 * heads + key_value)
        attention += 4 * heads * head_dim * (full_pairs if model.is_full(layer) else sliding_pairs)
    a_layer = {
        "mlp": 6 * tokens * hidden * model.ffn_hidden_size,
        "router": 2 * tokens * hidden * model.num_experts,
        "experts": 6 * tokens * topk * hidden * model.moe_ffn_hidden_size}
    return {"projections": projections, "attention": attention} | {part: model.num_layers * n for part, n in a_layer.items()}


def mtp_operations(model: ModelConfig, tokens: TokenCounts, head: int) -> float:
    """Forward operations of one depth of multi-token prediction: projection, a full layer over the clean tokens, head."""
    count = int(tokens.clean.sum())
    block = stack_operations(replace(model, num_layers=1, layer_types=("full",)), tokens=count,
                             full_pairs=causal_pairs(tokens.clean, None), sliding_pairs=0)
    return 4 * count * model.hidden_size ** 2 + sum(block.values()) + tokens.encoder_targets * head


def step_operations(model: ModelConfig, tokens: TokenCounts, *, recompute: str | None = None,
                    recompute_modules: tuple[str, ...] = (), frozen: bool = False) -> StepOperations:
    """The operations of one step. `recompute` and its modules are --recompute-granularity and --recompute-modules.

    `frozen`: adapters are trained beside weights that get no gradient. Their own operations, some percent at most, are not counted.
    """
    window, drafted = model.window_size, tokens.self_conditioned
    num_draft = int(tokens.canvas[drafted].sum())
    head = 2 * model.hidden_size * model.vocab_size

    def pairs(of: np.ndarray, window: int | None) -> int:
        return canvas_pairs(tokens.canvas[of], tokens.canvas_prefix[of], window)

    every = np.ones(len(tokens.canvas), bool)
    forward = stack_operations(
        model, tokens=int(tokens.clean.sum() + tokens.canvas.sum()),
        full_pairs=causal_pairs(tokens.clean, None) + pairs(every, None),
        sliding_pairs=causal_pairs(tokens.clean, window) + pairs(every, window))
    repeated = _repeated(forward, recompute, recompute_modules)
    if model.mtp_num_layers:
        forward["mtp"] = model.mtp_num_layers * mtp_operations(model, tokens, head)
    forward |= {
        # The soft embedding of canvases without a draft is zero, and so is the module's output.
        "self_conditioning": 6 * num_draft * model.hidden_size * model.ffn_hidden_size,
        "soft_embedding": num_draft * head,
        "head": (tokens.encoder_targets + tokens.decoder_targets) * head}
    draft = stack_operations(model, tokens=num_draft, full_pairs=pairs(drafted, None), sliding_pairs=pairs(drafted, window))
    backward = {part: n if part == "soft_embedding" else 2 * n for part, n in forward.items()}
    repeated |= {"soft_embedding": num_draft * head}
    if frozen:  # the input's gradient alone; what stands before the layers, and no embedding, gets none
        backward = {part: n if part == "attention" else n // 2 for part, n in backward.items()}
        backward["self_conditioning"] = backward["soft_embedding"] = repeated["soft_embedding"] = 0
    return StepOperations(draft=draft | {"head": num_draft * head}, forward=forward, backward=backward, repeated=repeated)


def _repeated(layers: Operations, recompute: str | None, modules: tuple[str, ...]) -> Operations:
    """The part of the layers' forward that the backward does again."""
    match recompute:
        case None:
            return {}
        case "full":
            return dict(layers)
        case "selective":
            parts = {"core_attn": ("attention",), "mlp": ("mlp",), "moe": ("router", "experts"), "mhc": ()}
            return {part: layers[part] for module in modules for part in parts[module]}
    raise ValueError(f"--recompute-granularity {recompute}: no operation count for it; set full or selective")
