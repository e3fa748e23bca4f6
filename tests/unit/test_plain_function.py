"""transformer.plain_function: what a function gives with and without gradient."""

import torch

from megatron_dllm.transformer.plain_function import PlainFunction


class Doubled(PlainFunction):
    calls = 0

    @staticmethod
    def forward(ctx, x, factor):
        Doubled.calls += 1
        ctx.factor = factor
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(x)
        ctx.set_materialize_grads(False)
        return x * factor, x.long()

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.factor, None


def test_a_forward_without_gradient_is_the_forward(monkeypatch):
    x = torch.tensor([1.5, -2.0], requires_grad=True)
    y, whole = Doubled.of(x, 2)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((2,), 2.0))
    monkeypatch.setattr(Doubled, "apply", None)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            again, same = Doubled.of(x, 2)
        assert torch.equal(again, y) and torch.equal(same, whole) and not again.requires_grad and again.grad_fn is None
    assert Doubled.calls == 3
