"""Foretell's retrieval in SGLang: a plug-in that drafts the trees of the algorithm NGRAM.

    FORETELL_SGLANG='{"method": "suffix"}' python -m sglang.launch_server --model-path MODEL \
        --speculative-algorithm NGRAM --speculative-num-draft-tokens 8

Written against SGLang 0.5.23. It was tested with stand-ins for SGLang's classes, and not run on a GPU.
"""

import json
import os

from foretell_sglang.trees import TreeDrafter

VARIABLE = "FORETELL_SGLANG"
"""Its options as JSON; where it is unset, SGLang stays as it is."""
__all__ = ["TreeDrafter", "register"]


def register() -> None:
    """Put the worker in the place of SGLang's own for NGRAM.

    Raises:
        ValueError: the variable holds no options.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return
    try:
        options = json.loads(given)
    except json.JSONDecodeError as error:
        raise ValueError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{VARIABLE} holds an object with a method and its options, found {given}")

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # SGLang needs a GPU.

    from foretell_sglang.worker import worker_class

    HookRegistry.register("sglang.srt.speculative.ngram_worker.NGRAMWorker", worker_class(options), HookType.REPLACE)
