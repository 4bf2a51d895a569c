"""Networks of trained speculators, one file each: the same code drafts and is trained."""

from collections.abc import Mapping

from foretell.draft.network.base import Speculator, SpeculatorConfig

NETWORKS: Mapping[str, tuple[type[SpeculatorConfig], type[Speculator]]] = {}
"""Configuration and network of every kind, by the name that checkpoints carry."""
