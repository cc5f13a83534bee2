"""Two small families whose states are no KV cache: what they remember is replaced (decaying_sum) or turns (ring)."""
