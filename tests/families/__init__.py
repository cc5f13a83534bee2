"""Small models whose states are not a plain KV cache: recurrent, rings, and hybrids."""
