"""Generation of tokens: scheduler, sampling, constraints, prefix cache, speculative decoding."""
