"""What `foretell serve` serves: loads it, in the process of the server or of a replica."""

from dataclasses import dataclass, replace
from pathlib import Path

from foretell.catalogue import catalogue, find
from foretell.cli.drafter_check import checked
from foretell.cli.setup import MethodSelection, load_models, set_threads
from foretell.core.target_options import TargetOptions
from foretell.model.load.adapter import adapter_name
from foretell.model.load.memory import available_memory
from foretell.model.load.reference import resolve_reference
from foretell.model.run.runner import shares_prefixes
from foretell.serve.defaults import read_defaults
from foretell.serve.fingerprint import file_bytes, system_fingerprint
from foretell.serve.loaded import LoadedModel, Methods
from foretell.serve.settings import EngineSettings

CHEAP_FAMILIES = ("baseline", "retrieval")
"""Methods without weights of their own: requests may ask for them."""
CACHE_SHARE = 0.5
"""Share of the free memory that caches of keys and values may take."""


@dataclass(frozen=True)
class ServedModel:
    """A model with everything that decides how it is served; `load` does the work."""

    model: str
    dtype: str
    device: str
    selection: MethodSelection
    references: tuple[Path, ...]
    target_options: TargetOptions
    engine: EngineSettings
    generation_config: str
    override_generation_config: str | None
    allowed: tuple[str, ...]
    """Further methods that requests may ask for."""
    threads: int | None
    sharing: int = 1
    """Engines that share the memory of a machine."""

    def load(self) -> LoadedModel:
        """Load it.

        Raises:
            ValueError: something cannot be loaded.
            OSError: a file cannot be read.
        """
        set_threads(self.threads)
        path = resolve_reference(self.model)
        defaults = read_defaults(self.generation_config, path, self.override_generation_config)
        setup = load_models(
            self.model, self.dtype, self.device, self.selection, self.references, target_options=self.target_options
        )
        cheap = {entry.name for entry in catalogue().values() if entry.family in CHEAP_FAMILIES}
        default = self.selection.name
        methods = Methods(
            # The options of the command line are for the method that it named.
            lambda name: checked(setup, setup.shared_method(name) if name == default else setup.other_method(name)),
            default,
            cheap | {find(name).name for name in self.allowed},
        )
        first = methods.get(default)
        if not self.allowed:
            # References are for the retrieval methods that requests may ask for.
            replace(setup.inputs, references=()).require_used({first.name: first.inputs})
        options = self.target_options
        adapters = [adapter_name(each).place for each in (*options.lora, *options.adapters)]
        runner, memory, engine = setup.model.runner(), available_memory(), self.engine
        if engine.cache_bytes is None and shares_prefixes(runner) and memory is not None:
            engine = replace(engine, cache_bytes=int(memory * CACHE_SHARE / self.sharing))
        fingerprint = system_fingerprint(path, adapters, runner.backend)
        return LoadedModel(setup.model, methods, engine, fingerprint, defaults, file_bytes(path))
