"""Mixtral (arXiv 2401.04088): Mistral with experts."""

from foretell.model.config.families.base import Family

MIXTRAL = Family(
    names={
        "mlp": "block_sparse_moe",
        "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
    }
)
