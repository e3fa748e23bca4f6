"""Plans for Transformer Engine's context parallelism, with a stand-in that attends as the package documents it, in plain torch, float64."""
import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_dllm.context_parallel import transformer_engine as package
from megatron_dllm.context_parallel.layout import SequenceLayout
from megatron_dllm.context_parallel.plan import Shards, sharded_plan
from megatron_dllm.parallel import Topology, create_context, gather_sequence
from megatron_dllm.transformer.core_attention import attend_dense
from tests.parallel import test_context_parallel as whole_model
from tests.unit.test_core_attention import random_inputs
from tests.unit.test_visibility import layout

CPU = torch.device("cpu")
CANVAS = 6
DOCUMENTS = {"one": ((41, 30),), "unequal": ((5, 0), (1, None), (90, 77), (16, 16), (15, 1)), "short": ((2, 1),), "no canvas": ((9, None),)}


def chunk_order(x, cp_size):
    """[2 R, n, ...], the chunks in order, from those of rank 0, 1, ...: r and 2R - 1 - r of each."""
    by_rank = x.unflatten(0, (cp_size, 2, -1))
    return torch.cat([by_rank[:, 0], by_rank[:, 1].flip(0)])


def as_documented(query, key, value, cp, *, comm_type, window=None, bias=None):
    """Own queries are chunks r and 2R - 1 - r of all; a bias has own queries and, chunk by chunk, all keys."""
    assert len(query) % 2 == 0 and len(key) % package.KEY_MULTIPLE == 0 and len(key) == len(value)
    assert window is None or comm_type in ("all_gather", "a2a")
    assert bias is None or (comm_type == "p2p" and bias.isfinite().all() and bias.shape == (len(query), cp.size * len(key)))
    keys, values = (chunk_order(gather_sequence(x, cp), cp.size).flatten(0, 1).repeat_interleave(query.shape[1] // x.shape[1], 1)
                    for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys)
    if bias is None:
        assert len(query) == len(key)
        half = torch.arange(len(query) // 2)
        place = torch.cat([cp.rank * len(half) + half, (2 * cp.size - 1 - cp.rank) * len(half) + half])
        behind = place[:, None] - torch.arange(len(keys))
        scores = scores.masked_fill((behind < 0) | (behind >= (window or len(keys))), -torch.inf)
    else:
        scores = scores + bias
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def shards_of(visibility, cp_size, rank, comm_type, window, kept):
    """(visibility of all queries and keys of the pass, shards)."""
    starts = np.unique(visibility.first_key[visibility.canvas_id < 0])
    placed = SequenceLayout.of(visibility.num_clean_keys, visibility.canvas_keys, ranks=cp_size, whole_canvases=False, documents=starts)
    held, clean, canvas = placed.clean, placed.clean, placed.canvas
    if kept:
        chosen = visibility.canvas_id == 0
        kept_keys = visibility.windowed(window).kept_keys(chosen)
        held = tuple(np.flatnonzero(np.isin(kept_keys, part)) for part in held)
        clean, canvas = tuple(part[:0] for part in clean), tuple(part[visibility.canvas_keys[part] == 0] for part in canvas)
        visibility = visibility.against_kept(chosen, kept_keys)
    return visibility, Shards(held, clean, canvas, False, comm_type, rank, package=True)


def worst_differences(rank, size, hidden):
    """Of each case, the largest difference of out or of any gradient of our rows from the dense oracle."""
    cp = create_context(Topology(world=size, cp=size), rank=rank, device=CPU, sequence_parallel=False).cp
    worst = {}
    with (mock.patch.object(package, "attention", as_documented), mock.patch.object(package, "KEY_MULTIPLE", 2),
          mock.patch.object(package, "QUERY_MULTIPLE", 4), mock.patch.object(package, "HIDDEN", hidden)):
        for name, documents in DOCUMENTS.items():
            for window, comm_type in ((None, "p2p"), (7, "all_gather"), (7, "a2a")):
                for kept in (False, True) if documents != DOCUMENTS["no canvas"] else (False,):
                    plain = layout(documents, canvas_length=CANVAS)
                    visibility, shards = shards_of(plain, size, rank, comm_type, window, kept)
                    worst[f"{name}, {comm_type}{', kept' * kept}"] = difference(visibility, window, shards, cp)
    return worst


def difference(visibility, window, shards, cp):
    """Of the attention of these shards."""
    inputs = random_inputs(visibility, heads=4, groups=2, dim=6, dtype=torch.float64)
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    num_clean = len(visibility.canvas_id) - len(visibility.canvas_keys)
    rows = torch.from_numpy(np.concatenate([shards.clean[cp.rank], num_clean + shards.canvas[cp.rank]]))
    keys = torch.from_numpy(np.concatenate([shards.held[cp.rank], visibility.num_clean_keys + shards.canvas[cp.rank]]))
    own = [x.detach()[chosen].requires_grad_() for x, chosen in zip(inputs, (rows, keys, keys), strict=True)]
    out = sharded_plan(visibility, window, shards, CPU).attend(*own, cp)
    found = [out, *torch.autograd.grad(out, own, upstream[rows])]
    expected = attend_dense(*inputs, visibility.windowed(window))
    wanted = [expected, *torch.autograd.grad(expected, inputs, upstream)]
    both = zip(found, wanted, (rows, rows, keys, keys), strict=True)
    return max(((a - b[chosen]).abs().max().item() for a, b, chosen in both if a.numel()), default=0.0)


@pytest.mark.parametrize("size", [2, 4])
def test_plans_equal_the_oracle(world, size):
    for rank, worst in enumerate(world.run(worst_differences, size, -1e4, size=size)):
        wrong = {name: found for name, found in worst.items() if not found <= 1e-12}
        assert len(worst) == 21 and not wrong, f"rank {rank}: {wrong}"


def test_a_bias_that_hides_nothing_is_seen(world):
    """Also of fill, which only the bias hides from canvases."""
    for worst in world.run(worst_differences, 2, 0.0, size=2):
        assert all(worst[f"{name}, p2p, kept"] > 1e-3 for name in ("one", "unequal", "short"))


def model_differences(rank, cases, multiple):
    """As the module of whole models, with both layer types by the package."""
    plain = whole_model.split_of
    with (mock.patch.object(package, "attention", as_documented), mock.patch.object(package, "KEY_MULTIPLE", multiple),
          mock.patch.object(whole_model, "split_of", lambda case, rank: dataclasses.replace(
              plain(case, rank), by_package=frozenset(["sliding", "full"])))):
        return whole_model.differences_from_one_process(rank, cases)


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [4, 128])
def test_a_model_gives_the_loss_and_gradients_of_one_process(world, multiple):
    """With chunks of 128 one rank has all clean tokens and the other mostly fill."""
    cases = {
        "packed": whole_model.Case(types=("all_gather", "p2p"), lengths=whole_model.LENGTHS, packed=True),
        "again, recomputed": whole_model.Case(types=("a2a", "p2p"), objective=whole_model.ALWAYS, recompute=frozenset(["block"]))}
    found = world.run(model_differences, cases, multiple, size=2)[0]
    assert found.keys() == cases.keys() and all(worst <= 1e-10 for _, worst in found.values()), found
