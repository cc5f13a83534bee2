"""The HTTP server.

A request passes through these modules in this order: http_server (process, connections, signals),
app (keys, limits, log), routes (paths) and exchange (body and response). served_models opens and
closes models. The package `api` computes the answers.
"""
