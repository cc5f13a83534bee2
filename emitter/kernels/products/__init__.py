"""Products of activations with packed weights, for one token, few, many, and experts."""
