"""castiron on a Ray cluster: actors for rows, replicas for requests, and copies of bundles."""
