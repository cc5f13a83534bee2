"""The catalogue: small faults of every kind, by the part of castiron that they are in."""

from tests.mutants.faults import families, generation, kernels, layers, packing, states

CATALOGUE = (
    *families.FAULTS,
    *layers.FAULTS,
    *packing.FAULTS,
    *kernels.FAULTS,
    *states.FAULTS,
    *generation.FAULTS,
)
