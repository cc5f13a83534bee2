"""Kernels for matmuls with packed weights: for one, few or many tokens, and for MoE experts.

Words that all its files use:

- row block: 16 rows of the weight; their outputs are in neighbouring lanes.
- codec group: the consecutive elements of a row that share a scale. codec block: the groups that
  a GGUF block has.
- record: one codec block of each of the 16 rows of a row block, as it is packed.
- unit: the elements of x that share a scale, 32 or more (`Codec.unit`); for floats, the elements
  of a row in one record.
- panel: a buffer on the stack with a decoded part of some row blocks.
- side: the scale and the base of the weights in a vector.
- share: what one workgroup computes.
"""
