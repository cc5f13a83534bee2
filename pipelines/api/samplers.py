"""llama.cpp's request field `samplers`: which samplers apply, and in which order."""

from collections.abc import Iterable
from dataclasses import replace

from castiron.pipelines.api.api_errors import unsupported
from castiron.pipelines.engine.sampling import SAMPLERS, Sampling

# llama.cpp's names and letters of the samplers; a sampler that stands for None is off in every request that is accepted.
NAMES = {
    name: sampler
    for sampler, names in (
        ("top_k", "top_k top-k k"), ("top_p", "top_p top-p nucleus p"), ("min_p", "min_p min-p m"),
        ("temperature", "temperature temp t"), ("penalties", "penalties e"),
        (None, "dry d typ_p typ-p typical_p typical-p typical y xtc x top_n_sigma top-n-sigma s adaptive_p adaptive-p a tfs_z"),
    )
    for name in names.split()
}  # fmt: skip
NO_PENALTIES = {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def with_samplers(sampling: Sampling, names: Iterable[str]) -> Sampling:
    """Return `sampling` with only these samplers, in this order; ApiError 400 if impossible."""
    found = [NAMES.get(name, name) for name in names]
    if unknown := [name for name in found if name not in NAMES.values()]:
        raise unsupported("samplers", f"{unknown[0]!r:.60} is not supported by this server; leave it out")
    active = [name for name in found if name]
    if repeated := [name for name in ("penalties", "temperature") if active.count(name) > 1]:
        raise unsupported("samplers", f"this server applies {repeated[0]} only once; list it once")
    unpenalised = replace(sampling, **NO_PENALTIES)
    if "penalties" not in active:
        sampling = unpenalised
    elif active.index("penalties") and sampling != unpenalised:
        raise unsupported("samplers", "this server applies penalties before all other samplers; put penalties first")
    order = tuple(name for name in active if name in SAMPLERS)
    if "temperature" not in order:
        order, sampling = (*order, "temperature"), replace(sampling, temperature=1.0, temperature_schedule=None)
    return replace(sampling, samplers=order)
