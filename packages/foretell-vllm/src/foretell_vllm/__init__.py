"""Foretell's retrieval in vLLM: a proposer for vLLM's speculative method `custom_class`.

    vllm serve MODEL --additional-config '{"foretell": {"method": "sam_recycling"}}' --speculative-config \
        '{"method": "custom_class", "model": "foretell_vllm.ForetellProposer", "num_speculative_tokens": 8}'

vLLM verifies the drafts, so texts stay its own. It takes chains only, in its model runner V1.
"""

from foretell_vllm.chains import BestChain
from foretell_vllm.proposer import ForetellProposer

__all__ = ["BestChain", "ForetellProposer"]
