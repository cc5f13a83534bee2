"""`castiron tune`: a search for tiles, by measurement on this machine, and what it found."""
