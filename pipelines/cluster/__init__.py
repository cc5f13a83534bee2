"""castiron on a Ray cluster: rows, requests, and how a bundle gets to every node."""
