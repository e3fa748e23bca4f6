"""Buckets, the distributed optimizer, norms and what ranks agree on, over gloo worlds, against sums made by hand (float64)."""

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_dllm.config import OptimizerConfig
from megatron_dllm.data_parallel.buckets import Bucket
from megatron_dllm.diffusion.losses import LossTerms
from megatron_dllm.parallel import ParallelContext, Topology, create_context
from megatron_dllm.parallel.communication import Pending
from megatron_dllm.parallel.gathering import gather_whole
from megatron_dllm.parallel.placement import place
from megatron_dllm.training.loop import agree
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.rank_times import RankTimes
from megatron_dllm.training.step import sum_terms

DTYPE = torch.float64
# Vocabulary 5 is cut over tp with fill; "heads" has one rectangle for two ranks; experts are cut by ep and etp; "norm" is a share.
SHAPES = {"vocabulary": (5, 3), "column": (4, 3), "heads": (2, 3), "norm": (3,), "experts": (2, 4, 3), "plain": (7, 2)}


@dataclass(frozen=True)
class Sizes:
    world: int
    tp: int = 1
    ep: int = 1
    etp: int = 1


def placements(context):
    tp = context.tp.size
    return {
        "vocabulary": place(SHAPES["vocabulary"], context, cut={"tp": 0}, fill=True),
        "column": place(SHAPES["column"], context, cut={"tp": 0}),
        "heads": place(SHAPES["heads"], context, cut={"tp": 0}, copies=max(1, tp // 2)),
        "norm": place(SHAPES["norm"], context, partial_over_tp=tp > 1),
        "experts": place(SHAPES["experts"], context, cut={"ep": 0, "etp": 1}, grid="expert"),
        "plain": place(SHAPES["plain"], context),
    }


def whole_values(name, salt=0):
    draw = torch.Generator().manual_seed(len(name) + 100 * salt)
    return torch.randn(SHAPES[name], generator=draw, dtype=DTYPE)


class Shards(nn.Module):
    """A parameter of each kind; the loss gives each its own gradient on each rank."""

    def __init__(self, context):
        super().__init__()
        self.tp = context.tp.size
        for name, placement in placements(context).items():
            local = torch.zeros(placement.local_shape, dtype=DTYPE)
            placement.region(local).copy_(placement.cut(whole_values(name)))
            parameter = nn.Parameter(local)
            parameter.placement = placement
            self.register_parameter(name, parameter)

    def loss(self, rank, names):
        """Rank r of the world gives a parameter's rectangle (r + 1) times a fixed whole gradient ("plain": alike over tp)."""
        factors = dict.fromkeys(SHAPES, rank + 1) | {"plain": rank // self.tp + 1}
        return sum((p.placement.region(p) * p.placement.cut(whole_values(name, 1))).sum() * factors[name]
                   for name, p in self.named_parameters() if name in names)


def factor(placement, topology, rank):
    """How many times the fixed gradient the finished one is: the sum of (r + 1) over the ranks that are summed."""
    own = topology.coordinates(rank)

    def summed(other):
        places = topology.coordinates(other)
        if placement.grid == "expert":
            return all(places[axis] == own[axis] for axis in ("etp", "ep", "pp"))
        same_tp = places["tp"] == own["tp"]
        if placement.partial_over_tp:
            same_tp = True
        elif placement.copies > 1:
            same_tp = places["tp"] // placement.copies == own["tp"] // placement.copies
        return same_tp

    return sum(other + 1 for other in range(topology.world) if summed(other))


def finished(rank, sizes, distributed, forget=""):
    """[(name, worst difference of the finished gradient from the sum by hand)], then the norm, its square by hand, and the zeros."""
    topology = Topology(world=sizes.world, tp=sizes.tp, ep=sizes.ep, etp=sizes.etp)
    context = create_context(topology, rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    model = Shards(context)
    optimizer = MasterOptimizer(model, OptimizerConfig(), context, distributed=distributed, bucket_elements=10)
    names = set(SHAPES) - {"plain"}
    model.loss(rank, names).backward()
    optimizer.buckets.last_microbatch()
    # Some ranks have no gradient for some parameters in their last microbatch: sums must pair up all the same.
    model.loss(rank, names if rank % 2 else {"norm", "experts"}).backward()
    if rank % 2 == 0:
        model.loss(rank, names - {"norm", "experts"}).backward()
    if forget:
        Bucket.start_sum, start = (lambda b: setattr(b, "pending", Pending(b.gradients[b.own]))), Bucket.start_sum
    optimizer.finish_gradients()
    if forget:
        Bucket.start_sum = start
    differences = {}
    for piece in optimizer.buckets.pieces():
        scale = 0 if piece.name == "plain" else 2 * factor(piece.placement, topology, rank)
        expected = piece.cut(whole_values(piece.name, 1)) * scale
        differences[piece.name] = (piece.gradient - expected).abs().max().item()
    return differences, optimizer.grad_norm().item(), optimizer.num_zeros()


LAYOUTS = {
    "dp2": Sizes(2), "dp4": Sizes(4), "tp2": Sizes(2, tp=2), "tp2 dp2": Sizes(4, tp=2), "tp4": Sizes(4, tp=4), "dp4 ep2": Sizes(4, ep=2),
    "tp2 dp2 ep2 etp2": Sizes(4, tp=2, ep=2, etp=2),
}


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_finished_gradients_are_the_sums_by_hand(world, sizes, distributed):
    results = world.run(finished, sizes, distributed, size=sizes.world)
    for differences, _, _ in results:
        assert max(differences.values()) < 1e-13, differences
    assert len({norm for _, norm, _ in results}) == 1 and {zeros for _, _, zeros in results} == {14}
    assert set().union(*(differences for differences, _, _ in results)) == set(SHAPES)


def test_norm_is_that_of_the_whole_gradient(world):
    # Every rank sums (1 + 2 + 3 + 4) * 2 of the dense gradients on dp4, and of the experts too.
    expected = torch.cat([whole_values(name, 1).flatten() for name in SHAPES if name != "plain"]).norm().item() * 20
    for distributed in (False, True):
        for _, norm, _ in world.run(finished, Sizes(4), distributed, size=4):
            assert norm == pytest.approx(expected, rel=1e-13)


def test_a_sum_left_out_is_seen(world):
    for differences, _, _ in world.run(finished, Sizes(2), False, "sums", size=2):
        assert min(difference for name, difference in differences.items() if name != "plain") > 0.1


def trained(rank, sizes, distributed):
    """Whole parameters after three steps, whole masters and moments, and bytes sent by kind."""
    context = create_context(Topology(world=sizes.world, tp=sizes.tp), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    model = Shards(context)
    optimizer = MasterOptimizer(model, OptimizerConfig(lr=0.1, clip_grad=1.0), context, distributed=distributed, bucket_elements=10)
    context.log.clear()
    for _ in range(3):
        optimizer.buckets.last_microbatch()
        model.loss(rank, SHAPES).backward()
        optimizer.finish_gradients()
        optimizer.step(0.1, optimizer.grad_norm())
    sent = context.log.by_kind()
    parameters = {name: gather_whole(p.detach(), p.placement, context) for name, p in model.named_parameters()}
    num_held = sum(h.master.numel() for h in optimizer.held)
    return parameters, dict(optimizer.masters()), {(name, state): x for name, state, x in optimizer.states()}, num_held, sent


@pytest.mark.parametrize("sizes", [Sizes(2), Sizes(4), Sizes(4, tp=2)], ids=["dp2", "dp4", "tp2 dp2"])
def test_distributed_optimizer_steps_as_the_whole_one(world, sizes):
    plain, sharded = (world.run(trained, sizes, distributed, size=sizes.world) for distributed in (False, True))
    for (parameters, masters, states, _, _), (ours, our_masters, our_states, _, sent) in zip(plain, sharded, strict=True):
        for name in SHAPES:
            assert torch.allclose(ours[name], parameters[name], rtol=1e-13, atol=0), name
            assert torch.equal(ours[name], our_masters[name]) and ours[name].shape == SHAPES[name]
            assert torch.equal(ours[name], sharded[0][0][name]), "ranks differ"
        assert masters.keys() == our_masters.keys() == set(SHAPES)
        assert states.keys() == our_states.keys() and len(states) == 2 * len(SHAPES)
        for key, state in states.items():
            assert torch.allclose(our_states[key], state, rtol=1e-12, atol=1e-300), key
        assert sent["reduce_scatter"][0] == sent["all_gather"][0]  # as many buckets gathered as scattered
    num_held = [of_rank[3] for of_rank in sharded]
    assert max(num_held) < plain[0][3]
    if sizes.tp == 1:
        assert sum(num_held) == plain[0][3]


class Parts(nn.Module):
    """The parameters of Shards in two parts that are called, and one ("plain") that is read directly."""

    def __init__(self, context):
        super().__init__()
        self.shards = Shards(context)
        self.parts = nn.ModuleList(Part(self.shards, names) for names in (("vocabulary", "column", "experts"), ("heads", "norm")))

    def forward(self):
        """Every element's square, by part: read after the part has been called."""
        return [part() for part in self.parts] + [self.shards.plain.square().sum()]


class Part(nn.Module):
    def __init__(self, shards, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, getattr(shards, name))

    def forward(self):
        return sum(parameter.square().sum() for parameter in self.parameters())


def overlapped(rank, beside_forward, forget=False):
    """Sums that three forwards read; gathers under way after each step and after each forward; the whole parameters at the end."""
    context = create_context(Topology(world=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    model = Parts(context)
    optimizer = MasterOptimizer(model, OptimizerConfig(), context, distributed=True, bucket_elements=10)
    if beside_forward:
        optimizer.gather_beside_forward(model.parts)
    if forget:
        for part in model.parts:
            part._forward_pre_hooks.clear()

    def under_way():
        return sum(bucket.gathering is not None for bucket in optimizer.buckets.buckets)

    read, after_step, after_forward = [], [], []
    for _ in range(3):
        sums = model()
        after_forward.append(under_way())
        read += [value.item() for value in sums]
        optimizer.buckets.last_microbatch()
        sum(sums).backward()
        optimizer.finish_gradients()
        optimizer.step(0.1, optimizer.grad_norm())
        after_step.append(under_way())
    optimizer.finish_gathers()
    return read, after_step, after_forward, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_gathers_beside_the_forward_change_nothing(world):
    for (read, none, _, parameters), (ours, after_step, after_forward, our_parameters) in zip(
            world.run(overlapped, False, size=2), world.run(overlapped, True, size=2), strict=True):
        assert none == [0, 0, 0] and min(after_step) >= 2 and after_forward == [0, 0, 0]
        assert read == ours
        assert all(torch.equal(value, our_parameters[name]) for name, value in parameters.items())


def test_a_module_that_does_not_wait_is_seen(world):
    for _, after_step, after_forward, _ in world.run(overlapped, True, True, size=2):
        assert after_forward[1:] == after_step[:2] and min(after_step) >= 2


def own_times(rank):
    """Metrics of three steps in which rank 1 takes longer until its last backward, and all wait for it after that; and a second drain."""
    ranks = RankTimes(create_context(Topology(world=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False))
    for _ in range(3):
        ranks.restart()
        time.sleep(0.06 if rank else 0.01)
        ranks.after_backward()
        dist.barrier()
    return ranks.drain(), ranks.drain()


def test_slowest_rank_is_the_one_that_the_others_wait_for(world):
    for metrics, again in world.run(own_times, size=2):
        assert metrics["slowest_rank"] == 1 and metrics["slowest_rank_ms"] > 1.5 * metrics["fastest_rank_ms"] > 15 and again == {}


def agreements(rank):
    """Reasons to stop and loss terms as the ranks agree on them."""
    context = create_context(Topology(world=2), rank=rank, device=torch.device("cpu"), sequence_parallel=False)
    terms = LossTerms(torch.tensor(float(rank)), *(torch.arange(3.0) + rank for _ in range(4)))
    reasons = [agree(reason, context) for reason in (None, "exit-interval", "SIGTERM" if rank else None)]
    return reasons, sum_terms(terms, context.dp_cp)


def test_ranks_agree(world):
    for reasons, terms in world.run(agreements, size=2):
        assert reasons == [None, "exit-interval", "SIGTERM"]
        assert terms.total.item() == 1 and terms.counts.tolist() == [1, 3, 5] and terms.counts.dtype == DTYPE


def test_one_process_is_a_world_of_one():
    model = Shards(ParallelContext.single())
    optimizer = MasterOptimizer(model, OptimizerConfig(), ParallelContext.single(), distributed=True)
    optimizer.buckets.last_microbatch()
    model.loss(0, SHAPES).backward()
    optimizer.finish_gradients()
    expected = torch.cat([whole_values(name, 1).flatten() for name in SHAPES]).norm()
    assert optimizer.grad_norm().item() == pytest.approx(expected.item(), rel=1e-14)
