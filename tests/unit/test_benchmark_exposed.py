"""The share of communication that nothing runs beside, on timelines drawn by hand."""

import json

import pytest

from tools.benchmarking.exposed import Work, after_first, exposure, intersection, read_trace, table_of, union

COMBINE = "void deep_ep::intranode::combine<__nv_bfloat16, 2, 768, 4096>(...)"


def test_union_and_intersection():
    assert union([(5, 9), (0, 2), (1, 3), (9, 10), (6, 7)]) == [(0, 3), (5, 10)]
    assert intersection([(0, 3), (5, 10)], [(1, 2), (2.5, 6), (9, 12)]) == [(1, 2), (2.5, 3), (5, 6), (9, 10)]
    assert intersection([], [(0, 1)]) == [] == union([])


def test_exposure():
    """Milliseconds:     0 1 2 3 4 5 6 7 8 9 10
    other work           ###         # #
    deep_ep                ####      ####
    all-gather               ##
    """
    work = [Work("gemm", 0, 1500), Work("gemm", 5000, 5500), Work("Memcpy DtoD", 6000, 6500), Work(COMBINE, 1000, 3000),
            Work(COMBINE, 5000, 7000), Work("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2000, 4000)]
    result = exposure(work)
    assert (result.span, result.busy) == (7.0, 6.0)
    assert result.by_kind.keys() == {"deep_ep", "all-gather"}
    deep_ep, gather = result.by_kind["deep_ep"], result.by_kind["all-gather"]
    assert (deep_ep.kernels, deep_ep.running, deep_ep.exposed) == (2, 4.0, 2.5)
    assert (gather.kernels, gather.running, gather.exposed) == (1, 2.0, 2.0)
    # What two transfers share counts once.
    assert (result.total.kernels, result.total.running, result.total.exposed) == (3, 5.0, 3.5)
    assert "58.3% of 6.00 ms" in result.text() and "50.0% of 7.00 ms" in result.text()


NAMES = {
    COMBINE: "deep_ep",
    "void deep_ep::layout::get_dispatch_layout<256, 4, 8>(...)": "deep_ep",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "all-to-all",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)": "all-reduce",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)": "reduce-scatter",
    "ncclDevKernel_Broadcast_RING_LL(...)": "other NCCL",
    "void at::native::vectorized_elementwise_kernel<4>(...)": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_kind(name):
    assert Work(name, 0, 1).kind == NAMES[name]


def test_read_trace():
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 10.5, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "b", "ts": 0, "dur": 99},
        {"ph": "X", "cat": "gpu_memset", "name": "c", "ts": 1, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    assert read_trace(json.loads(json.dumps({"traceEvents": events}))) == [Work("a", 10.5, 12.5), Work("c", 1, 2)]


def test_a_profile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="take a CUDA device"):
        exposure([])


def test_after_first():
    meeting, step = Work("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 5, 9), Work("gemm", 9, 10)
    later = Work("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 11, 12)
    assert after_first("all-reduce", [Work("fill", 1, 2), later, step, Work("copy", 6, 8), meeting]) == [later, step]


def test_table_of_kernels():
    work = [Work("a", 0, 1000), Work("b", 500, 4500), Work("a", 5000, 6000)]
    first, most, *rest = table_of(work, 1).splitlines()
    assert first.split() == "3 kernels, busy 5.5 of 6.0 ms".split() and most.split() == "4.000 ms 1 x 4000.0 us b".split() and not rest
