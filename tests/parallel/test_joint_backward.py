"""One backward for both passes on ranks that share the batch (float64): a rank without drafts beside one that has some."""
import pytest
import torch

from megatron_dllm.config import OptimizerConfig
from megatron_dllm.parallel import Topology, communication, create_context
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import train_step
from tests.parallel.test_moe_model import make_inputs, mixed_plan
from tests.unit.toy import toy_model


def trained(rank, passes, distributed):
    """Losses and gradient norms of two steps of two ranks, the parameters then, and whether the rank's passes were joined."""
    context = create_context(Topology(world=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    model, plan = toy_model(context=context), mixed_plan(2)
    # Small buckets, so that their sums start while the backward goes on.
    optimizer = MasterOptimizer(model, OptimizerConfig(lr=1e-2), context, distributed=distributed, bucket_elements=2000)
    inputs = make_inputs(plan, rank, context, second_loop=False, passes=passes)
    steps = [train_step(model, optimizer, [inputs], 1e-2) for _ in range(2)]
    communication.all_reduce(torch.zeros(()), context.world)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return [(step.loss, step.grad_norm) for step in steps], parameters, inputs.joint is not None


@pytest.mark.parametrize("distributed", [False, True])
def test_steps_of_two_ranks(world, distributed):
    wanted, found = (world.run(trained, passes, distributed, size=2) for passes in ("shared", "joint"))
    assert [rank[2] for rank in found] == [True, False]
    for (steps, parameters, _), (own_steps, own_parameters, _) in zip(wanted, found, strict=True):
        torch.testing.assert_close(torch.tensor(own_steps), torch.tensor(steps), rtol=1e-10, atol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(own_parameters[name], value, rtol=1e-7, atol=1e-9)
