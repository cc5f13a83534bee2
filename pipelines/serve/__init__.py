"""A bundle behind OpenAI's HTTP API.

From the outside in: server (process, signals), app (routes, limits), api (requests into sequences, events into
replies). What serves them is in generation, which knows no HTTP: engine (the thread that owns the model), scheduler
(which sequence runs next), prefix_cache (which slot). Which status an error has is decided in errors.
"""
