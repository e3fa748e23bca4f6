"""training.graphs with the gradients' sums in the recording of a step's last microbatch."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatron_dllm.config import ObjectiveConfig, OptimizerConfig
from megatron_dllm.kernels.graphs import Recording
from megatron_dllm.parallel import Group
from megatron_dllm.tensor_parallel import cross_entropy, linear
from megatron_dllm.training.graphs import GraphedMicrobatches, forward_backward_of, gradients_used, groups_within, note
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import forward_backward
from tests.unit.toy import LENGTHS, toy_inputs, toy_model, toy_plan

LATE = "self_conditioning.mlp.down.weight"  # which no microbatch without a draft uses


class Taped(TorchDispatchMode):
    """Writes down the operations that are done meanwhile."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, out))
        return out


class Tape:
    """A recorder whose recordings do the same operations again on the same memory, as a CUDA graph does: nothing of Python runs."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def warm_up(self, function):
        return function()

    def record(self, function):
        buckets = self.optimizer.buckets.buckets
        touched = [t for bucket in buckets for t in (bucket.gradients, *(gradient.is_fresh for gradient in bucket.main_gradients))]
        kept = [tensor.clone() for tensor in touched]
        with Taped() as tape:
            result = function()
        for tensor, before in zip(touched, kept, strict=True):  # a recording does no work
            tensor.copy_(before)

        def replay():
            with torch.no_grad():
                for function, args, kwargs, out in tape.operations:
                    for old, new in zip(tree_flatten(out)[0], tree_flatten(function(*args, **kwargs))[0], strict=True):
                        if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                            old.copy_(new)

        return Recording(replay, result)


def late_gradients(order, *, with_state):
    """Of each step of microbatches without (A) and with a draft (B) the norm of LATE's gradient by calls and by recordings."""
    inputs = {}
    for name, share in (("A", 0.0), ("B", 1.0)):
        objective = ObjectiveConfig(self_conditioning_prob=share)
        inputs[name] = toy_inputs(toy_plan(objective, LENGTHS[:3]), objective=objective, dtype=torch.float32)
    runs = []
    for by_graphs in (False, True):
        model = toy_model(torch.bfloat16)
        optimizer = MasterOptimizer(model, OptimizerConfig(lr=1e-3), model.context)
        graphs = GraphedMicrobatches(
            forward_backward_of(model), lambda notes, model=model: note(model, notes), Tape(optimizer), device=torch.device("cpu"), limit=8,
            run_last=forward_backward_of(model, None, optimizer),
            state=(lambda optimizer=optimizer: gradients_used(optimizer)) if with_state else lambda: 0)
        norms, bucket = [], next(b for b in optimizer.buckets.buckets if LATE in b.names)
        for name in order:
            forward_backward(model, optimizer, [inputs[name]], graphs=graphs if by_graphs else None)
            norms.append(bucket.gradient(bucket.names.index(LATE)).norm().item())
            optimizer.step(1e-3, optimizer.grad_norm())
        runs.append((norms, graphs.drain()))
    return runs[0][0], runs[1][0], runs[1][1].recorded


@pytest.fixture
def buffers(monkeypatch):
    """As on CUDA, gradients are put off to fp32 buffers, and no tensor's size depends on the numbers in another."""
    monkeypatch.setattr(cross_entropy, "_is_first_of_largest", lambda logits, rows, is_largest: (logits.argmax(1) == rows) & is_largest)
    monkeypatch.setattr(linear, "_have_buffers", lambda x, tp, weights: tp.size == 1 and torch.is_grad_enabled() and any(
        w.requires_grad and w.main_gradient is not None for w in weights))


def test_a_gradient_that_is_used_later_is_cleared_by_recordings_made_before(buffers):
    expected, found, recorded = late_gradients("AAABAAAA", with_state=True)
    assert found == expected and expected[3] > 0 == expected[4] and recorded == 2


def test_without_the_state_it_is_not(buffers):
    expected, found, _ = late_gradients("AAABAAAA", with_state=False)
    assert found[4] > 0 == expected[4]


@pytest.mark.parametrize(("sizes", "world"), [((2, 1, 1, 2), False), ((2, 2, 4, 1), False), ((3, 1, 2, 1), True), ((1, 2, 3, 1), True)])
def test_groups_within_a_unit(sizes, world):
    class Context:
        tp, cp, ep, etp = (Group(name, size, 0, None, tuple(range(size)))
                           for name, size in zip(("tp", "cp", "ep", "etp"), sizes, strict=True))
        pp = Group.single("pp")
        world = Group("world", 12, 0, None, tuple(range(12)))

    assert (groups_within(Context, sums_load=False) == (Context.world,)) == world
    assert groups_within(Context, sums_load=True) == (Context.world,)
