"""From a checkpoint to a bundle."""
