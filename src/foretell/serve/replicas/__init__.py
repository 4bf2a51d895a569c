"""Several replicas of the engine behind a gateway, on Ray Serve.

The gateway takes the HTTP requests and gives each to a replica, which runs the same endpoints as a server of one
process. `messages`, `outlet`, `prefixes`, `metrics` and `gateway` know nothing of Ray; the other modules import it.
"""
