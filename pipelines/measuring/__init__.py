"""How fast a bundle is, what the machine could do at most, and what others do."""
