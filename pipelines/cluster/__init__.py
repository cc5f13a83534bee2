"""castiron on a cluster of Ray: many rows, many requests, and how a bundle comes to every node."""
