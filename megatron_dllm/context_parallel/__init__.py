"""Context parallelism: the ranks of cp share the tokens of each sequence.

    layout      which token is on which rank (pure arithmetic)
    partial     attention to some of the keys, with log-sum-exp, and how such results are merged
    plan        one layer type's attention over sharded tokens, from lengths alone
    stationary  queries stay and keys come to them: halo, all_gather, p2p
    heads       tokens traded for heads and back: a2a
    replicated  keys stay and the few queries of canvases go to them
    transformer_engine   the package's own context parallelism, in place of these where it can
    transfers   the exchanges, counted
"""
