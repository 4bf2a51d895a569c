"""gpt-oss (arXiv 2508.10925): a score per query head beside those of the keys, experts with biases."""

from foretell.model.config.families.base import Family

GPT_OSS = Family(names={"mlp.gate": "mlp.router"}, experts="alternating")
