"""The orders in which weights store their columns."""

from collections.abc import Mapping

from castiron.pipelines.checkpoints.checkpoint import Tensor

# The end of the names of tensors with the order of a weight's columns.
ORDER = "column_order"


def column_orders(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Find the column permutations of weights, and drop duplicates of the same permutation.

    The permutation of a weight `*.weight` is the tensor `*.column_order`.

    Returns the tensors without the duplicates, and {name of a weight: name of the tensor with its
    permutation}.
    """
    found, orders, names = dict(tensors), dict[str, str](), dict[bytes, str]()
    for name, tensor in tensors.items():
        if name.endswith(f".{ORDER}"):
            orders[name.removesuffix(ORDER) + "weight"] = known = names.setdefault(tensor.data.tobytes(), name)
            if known != name:
                del found[name]
    return found, orders
