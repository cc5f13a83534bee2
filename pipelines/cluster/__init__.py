"""castiron on a Ray cluster: actors that answer the rows of datasets, and Ray Serve replicas."""
