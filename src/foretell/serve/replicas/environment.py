"""Environment variables of a cluster of Ray on this machine. Ray reads them when it is imported."""

import os
import secrets

TOKEN_BYTES = 32


def prepare_environment() -> None:
    """Set what is not set yet; called before Ray is imported.

    Ray listens on all interfaces and runs what it is sent: only processes that know the token may send. It reports its
    usage over the network unless it is told not to.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # The default is 15: replicas would wait for every other program of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(TOKEN_BYTES)}
