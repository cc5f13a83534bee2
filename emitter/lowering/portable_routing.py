"""Parts of the routing to experts in StableHLO: ranks, groups of experts, and repeated rows."""

from __future__ import annotations

import numpy as np

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.types import F32


def ranks(rated: Value) -> Value:
    """Return the rank of each number in its row, f32 [rows, n]: 0 for the largest.

    Of equal numbers, the one with the lower index has the lower rank.
    """
    rows, n = rated.shape
    pairs = (rows, n, n)
    own, other = (ops.broadcast_in_dim(rated, pairs, dims) for dims in ((0, 1), (0, 2)))
    lower = ops.compare("LT", ops.iota(pairs, 2), ops.iota(pairs, 1))
    before = ops.or_(ops.compare("GT", other, own), ops.and_(ops.compare("EQ", other, own), lower))
    return ops.reduce("add", ops.convert(before, F32), (2,), exact=True)


def of_best_groups(rated: Value, groups: int, chosen_groups: int, best_of_group: int) -> Value:
    """Replace the scores [T, experts] outside the `chosen_groups` best groups by -inf.

    best_of_group: the score of a group is the sum of its `best_of_group` largest scores.
    """
    (tokens, experts), each = rated.shape, rated.shape[1] // groups
    apart = ops.reshape(rated, (tokens * groups, each))
    best = ops.compare("LT", ranks(apart), ops.constant(float(best_of_group), F32, apart.shape))
    sums = ops.reduce("add", ops.select(best, apart, ops.constant(0.0, F32, apart.shape)), (1,))
    rank = ranks(ops.reshape(sums, (tokens, groups)))
    rank = ops.reshape(ops.broadcast_in_dim(rank, (tokens, groups, each), (0, 1)), (tokens, experts))
    taken = ops.compare("LT", rank, ops.constant(float(chosen_groups), F32, rank.shape))
    return ops.select(taken, rated, ops.constant(-np.inf, F32, rated.shape))


def rows_of_pairs(x: Value, per_token: int) -> Value:
    """Repeat each row of x [T, in] `per_token` times in sequence; return [T * per_token, in]."""
    (tokens, features), pairs = x.shape, x.shape[0] * per_token
    return ops.reshape(ops.broadcast_in_dim(x, (tokens, per_token, features), (0, 2)), (pairs, features))
