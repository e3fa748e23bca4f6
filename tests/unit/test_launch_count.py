"""How many kernels a microbatch launches: a budget, so that bookkeeping does not creep back into every layer."""
from __future__ import annotations

import dataclasses

import torch

from megatron_dllm.config import PRESETS, ObjectiveConfig
from tests.unit.launch_count import LaunchCounter, count_kernels_as_launches
from tests.unit.toy import toy_inputs, toy_model, toy_plan

TOY = dataclasses.replace(PRESETS["toy"], vocab_size=61)
TWICE = ObjectiveConfig(self_conditioning_prob=1.0)
# Of forward and backward, draft and second loop, the head by plain torch (its kernels are fewer). Lower them when you can.
LAYER, REST = 182, 250


def launches(num_layers: int, monkeypatch) -> LaunchCounter:
    config = dataclasses.replace(TOY, num_layers=num_layers, layer_types=("sliding",) * (num_layers - 1) + ("full",))
    inputs = toy_inputs(toy_plan(TWICE, ((3, 30),), config=config), objective=TWICE, config=config, dtype=torch.float32)
    assert inputs.second_pass is not None
    counter = LaunchCounter()
    with monkeypatch.context() as patches:
        count_kernels_as_launches(counter, patches)
        model = toy_model(torch.bfloat16, config=config)  # whose layers hold the functions that they call
        with counter:
            model(inputs).total.backward()
    return counter


def test_launches_of_a_microbatch_stay_in_budget(monkeypatch):
    one, two = (launches(num_layers, monkeypatch) for num_layers in (1, 2))
    layer = two.launches - one.launches
    rest = one.launches - layer
    print("a layer:", layer.total(), "\nthe rest:", rest.total())
    assert layer.total() <= LAYER, f"a layer launches {layer.total()}: {layer.most_common()}"
    assert rest.total() <= REST, f"beside its layers a microbatch launches {rest.total()}: {rest.most_common()}"


def test_what_is_counted():
    counter = LaunchCounter()
    x = torch.ones(3, 4)
    with counter:
        y = (x.t()[1:] + 1).reshape(-1)
        with counter.paused():
            y = y * 2
        torch.empty(3).copy_(y[:3])
    assert counter.launches == {"add.Tensor": 1, "clone.default": 1, "copy_.default": 1}  # the rows of x.t() do not lie in a row
