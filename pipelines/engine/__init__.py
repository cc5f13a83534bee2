"""Token generation: scheduler, sampling, constraints, prefix cache, speculative decoding."""
