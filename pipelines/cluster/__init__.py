"""castiron on a Ray cluster: actors for dataset rows, Ray Serve replicas, and bundle transfer."""
