"""Weights whose columns are stored in another order than the features that they multiply.

GPTQ's act-order (desc_act) quantises columns of similar importance in one group. llama.cpp's
converter reorders the value heads of Qwen 3.5, and a block may span two of them. In both cases
`x.weight` stays as it is stored, and the tensor `x.column_order`, f32 [in], has for each column the
feature that it multiplies. The compiled model permutes its activations.
"""

from collections.abc import Mapping

from castiron.pipelines.checkpoints.checkpoint import Tensor

# The end of the names of tensors with the order of a weight's columns.
ORDER = "column_order"


def column_orders(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors without repeated orders, and {name of a weight: name of its order}."""
    distinct, orders, names = dict(tensors), dict[str, str](), dict[bytes, str]()
    for name, tensor in tensors.items():
        if name.endswith(f".{ORDER}"):
            orders[name.removesuffix(ORDER) + "weight"] = known = names.setdefault(tensor.data.tobytes(), name)
            if known != name:
                del distinct[name]
    return distinct, orders
