"""castiron on a Ray cluster: actors that answer the prompts of datasets, and Ray Serve replicas."""
