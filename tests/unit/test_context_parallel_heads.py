"""megatron_dllm.context_parallel.heads: which heads a rank gets when tokens are traded for them."""
import pytest

from megatron_dllm.config.checks_model import full_heads_for_tokens
from megatron_dllm.context_parallel.heads import heads_of


def table(ranks, heads):
    return [list(range(heads)[heads_of(rank, ranks, heads)]) for rank in range(ranks)]


def test_heads_of_by_hand():
    assert table(2, 4) == [[0, 1], [2, 3]]
    assert table(4, 4) == [[0], [1], [2], [3]]
    assert table(4, 2) == [[0], [0], [1], [1]]
    assert table(3, 1) == [[0], [0], [0]]
    assert table(1, 5) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(("ranks", "heads"), [(2, 3), (4, 6), (3, 2)])
def test_heads_that_cannot_be_dealt_are_refused(ranks, heads):
    with pytest.raises(ValueError, match=f"{heads} heads neither divide over {ranks} .*set --cp-comm-type to p2p or all_gather"):
        heads_of(0, ranks, heads)


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1), (8, 8), (16, 2), (12, 3)])
def test_every_query_head_meets_its_own_key_head(heads, groups):
    """Wherever the configuration's check lets a trade through: query head i reads key head i // (heads / groups)."""
    tried = 0
    for ranks in range(1, heads + 1):
        if full_heads_for_tokens("a2a", ranks, 1, heads, groups) is not None:
            continue
        tried += 1
        for rank in range(ranks):
            queries, keys = (range(number)[heads_of(rank, ranks, number)] for number in (heads, groups))
            read = [keys[place // (len(queries) // len(keys))] for place in range(len(queries))]
            assert read == [query // (heads // groups) for query in queries]
    assert tried > 1
