"""Reading and replacing what a layer has of a recurrent state, of one sequence or of each of a batch."""

from __future__ import annotations

from castiron.emitter import ops
from castiron.emitter.ir import Value
from castiron.emitter.types import I32


def of_layer(state: Value, layer: int, sequences: int) -> Value:
    """The state [sequences * layers, ...] of a layer: [sequences, ...]."""
    per, own = state.shape[0] // sequences, state.shape[1:]
    by_sequence = ops.reshape(state, (sequences, per, *own))
    rest = [0] * len(own)
    return ops.reshape(ops.slice_(by_sequence, (0, layer, *rest), (sequences, layer + 1, *own)), (sequences, *own))


def with_layer(state: Value, layer: int, after: Value) -> Value:
    """The state [sequences * layers, ...] where a layer's is `after`, [sequences, ...]."""
    sequences, own = after.shape[0], state.shape[1:]
    zero = ops.constant(0, I32, ())
    at = [zero, ops.constant(layer, I32, ()), *(zero for _ in own)]
    by_sequence = ops.reshape(state, (sequences, state.shape[0] // sequences, *own))
    carried = ops.dynamic_update_slice(by_sequence, ops.reshape(after, (sequences, 1, *own)), at)
    return ops.reshape(carried, state.shape)


def where_run(positions: Value, after: Value, before: Value) -> Value:
    """`after` [sequences, ...] of those sequences of a batch whose position is not negative, `before` of those left alone."""
    runs = ops.compare("GE", positions, ops.constant(0, I32, positions.shape))
    return ops.select(ops.broadcast_in_dim(runs, after.shape, (0,)), after, before)
