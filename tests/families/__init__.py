"""Two small families whose states are not a KV cache: recurrent (decaying_sum) and a ring."""
