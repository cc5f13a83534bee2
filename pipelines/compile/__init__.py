"""Compile checkpoints into bundles.

An `Importance` has by weight a factor for the squared errors of each column, f32 [in]; without one,
all columns count equally. `progress` is called with (name of a stage, fraction done).
"""
