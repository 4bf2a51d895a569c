"""Imports go down only: which module may know which, wherever in a file the import stands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import foretell

ROOT = Path(foretell.__file__).parent
ORDER = [
    ("utils", "distributions.divergence", "core.best_tree", "core.engine_bound"),
    (
        "core.tree",
        "model",
        "model.activation",
        "model.attention_config",
        "model.backend",
        "model.block_table",
        "model.cache",
        "model.compressed_config",
        "model.config",
        "model.config_readers",
        "model.embedding_and_head",
        "model.expert_matrices",
        "model.families",
        "model.kv_cache",
        "model.layer_inputs",
        "model.linear",
        "model.load.experts",
        "model.load.gguf",
        "model.load.mapped_file",
        "model.load.safetensors_file",
        "model.moe",
        "model.packed_groups",
        "model.read_weights",
        "model.rope",
        "model.rope_config",
        "model.state_config",
        "model.stored_matrix",
        "model.training.chunked_attention",
    ),
    ("model.layout",),
    ("model.state_plan",),
    (
        "model.attention",
        "model.attention_sums",
        "model.cache_policy",
        "model.kernels",
        "model.pages",
        "model.state_layers",
        "model.state_store",
    ),
    ("model.top_tokens",),
    ("core",),
    ("tokenizer", "retrieval.suffix_array"),
    ("distributions", "retrieval", "structured"),
    ("model.decoder",),
    ("model.sparsity",),
    ("model.kernels.neuron_file", "model.kernels.placed_neurons", "model.kernels.sparse"),
    (
        "model.compact_runner",
        "model.halves_runner",
        "model.compress",
        "model.diffusion.attention",
        "model.cuda_graph",
        "model.evicting_runner",
        "model.kernels.decoder",
        "model.load.quantization_config",
        "model.latent",
        "model.load.latent",
        "model.load.layer_parts",
        "model.load.state_blocks",
        "model.load.block_names",
        "model.load.build",
        "model.load.low_rank",
        "model.load.gguf_weights",
        "model.load.weights",
        "model.network",
        "model.offload",
        "model.partial_pass",
        "model.runner",
        "model.training",
    ),
    ("model.mtp",),
    (
        "model.diffusion",
        "model.influence",
        "model.load",
        "model.neuron_placement",
        "model.placement_file",
        "model.reduced_vocabulary",
        "model.resized_vocabulary",
        "model.skip",
        "model.sparsity_file",
    ),
    ("speculator.network",),
    ("draft", "accept"),
    ("shape",),
    ("engine.method", "engine.statistics", "speculator"),
    ("engine", "catalogue"),
    ("plan",),
    ("api",),
    ("load", "testing", "retrieval.corpus"),
    ("__init__",),
    ("train.data", "tune"),
    ("train", "train.objective", "quantize"),
    ("compress", "sparsify", "train.recipe"),
    ("train.loop",),
    ("assess", "bench", "diffusion", "nat", "roofline", "verify", "serve"),
    ("reproduce",),
    ("cli",),
    ("__main__",),
]
"""From the ground up.

Modules of one line may know each other; a package stands for all its modules that are not named themselves.
"""
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""Imports that go up nevertheless, as (importing module, imported module), each with its reason."""


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in ROOT.rglob("*.py")}


def _level(module: str) -> int | None:
    levels = {name: level for level, names in enumerate(ORDER) for name in names}
    parts = module.split(".")
    longest = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((levels[name] for name in longest if name in levels), None)


def _imports(source: str) -> Iterator[str]:
    """Modules of the package that some code imports: at its head, inside functions, for type checking, in any form."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            inside = name.split(".")[1:] if name.split(".")[0] == "foretell" else None
            if inside is not None:
                # What is imported from a module may be a name in it: the longest part that is a module is what gets
                # imported.
                parts = (".".join(inside[:n]) for n in range(len(inside), 0, -1))
                yield next((part for part in parts if part in MODULES), "__init__")


def test_every_module_has_a_place_and_every_place_a_module() -> None:
    assert [m for m in MODULES if _level(m) is None] == []
    places = [name for names in ORDER for name in names]
    assert [name for name in places if name not in MODULES] == [] and len(set(places)) == len(places)
    inside = tuple(name for name in places if name.startswith("model."))
    assert [m for m in MODULES if m.startswith("model.") and not m.startswith(inside)] == [], (
        "model/ has places of its own"
    )


def test_imports_go_down() -> None:
    up = {
        (module, other)
        for module, path in MODULES.items()
        for other in _imports(path.read_text("utf-8"))
        if (_level(other) or 0) > (_level(module) or 0)
    }
    assert up == set(EXCEPTIONS)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import foretell.engine.engine", {"engine.engine"}),
        ("import torch, foretell", {"__init__"}),
        ("from foretell import load", {"load"}),
        ("from foretell import Request", {"__init__"}),
        ("from foretell.engine.engine import Engine", {"engine.engine"}),
        ("from foretell.model import kernels, layout", {"model.kernels", "model.layout"}),
        ("from foretell.model.kernels import decoder as d", {"model.kernels.decoder"}),
        ("def f():\n    if True:\n        from foretell.cli import main", {"cli"}),
        ("if TYPE_CHECKING:\n    from foretell.api import Model", {"api"}),
        ("import foretelling", set()),
    ],
)
def test_every_form_of_import_is_seen(source: str, found: set[str]) -> None:
    assert set(_imports(source)) == found


def test_the_analyzer_needs_no_weights() -> None:
    for module, path in MODULES.items():
        if module.startswith("roofline"):
            known = {m for m in _imports(path.read_text("utf-8")) if not m.startswith("roofline")}
            readers = {m for m in known if m.startswith("model.config_readers.")}
            configs = {"model.config", "model.state_config"}
            allowed = configs | {"core.best_tree", "utils.assignments", "utils.names", "utils.validation"}
            assert known - readers <= allowed, f"{module} imports {known}"


@pytest.mark.parametrize("name", foretell.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(foretell, name) is not None
