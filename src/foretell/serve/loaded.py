"""The model that a server serves, and the methods that its requests may ask for."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from foretell.api import Model
from foretell.catalogue import find
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.request import Request
from foretell.serve.settings import EngineSettings
from foretell.utils.names import unknown

PLAIN = "autoregressive"
MAX_SALTED = 8
"""Trained drafters of different cache salts that are kept, those used last."""


class Methods:
    """The methods of one engine by name, built when they are asked for first; any thread may ask.

    `build` makes a method with its initial state.
    """

    def __init__(self, build: Callable[[str], AnyMethod], default: str, allowed: Collection[str]) -> None:
        self._build, self.default = build, default
        self.allowed = frozenset(allowed) | {default, PLAIN}
        self._built = dict[str, AnyMethod]()
        self._salted = OrderedDict[tuple[str, str], AnyMethod]()
        """Methods whose drafters are trained while they serve, by name and cache salt; the one used last at the end."""
        self._lock = threading.Lock()

    def get(self, name: str) -> AnyMethod:
        """A method.

        Raises:
            ValueError: requests may not ask for it, or something that it needs is missing.
        """
        built = self._built.get(name)
        return self._build_once(self._allowed_name(name)) if built is None else built

    def _allowed_name(self, name: str) -> str:
        allowed = sorted(self.allowed)
        try:
            method = find(name).name
        except ValueError:
            raise unknown("method", name, allowed) from None
        if method not in self.allowed:
            raise ValueError(
                f"requests to this server may not ask for the method {method!r}, but for {', '.join(allowed)}; start "
                f"it with --request-method {method} to change that"
            )
        return method

    def _build_once(self, name: str) -> AnyMethod:
        with self._lock:
            if name not in self._built:
                self._built[name] = self._build(name)
            return self._built[name]

    def for_salt(self, method: AnyMethod | None, salt: str) -> AnyMethod | None:
        """The method for requests of a cache salt: a drafter that is trained while it serves learns from each salt
        apart. `method`: None is the engine's own.
        """
        if not salt:
            return method
        known = self.get(self.default) if method is None else method
        return self._for_salt(known.name, salt) if known.draft.learns else method

    def _for_salt(self, name: str, salt: str) -> AnyMethod:
        with self._lock:
            method = self._salted.pop((name, salt), None)
            self._salted[name, salt] = self._build(name) if method is None else method
            if len(self._salted) > MAX_SALTED:
                self._salted.popitem(last=False)
            return self._salted[name, salt]

    def clear(self) -> None:
        """Forget what was built: a new engine begins with new methods."""
        with self._lock:
            self._built.clear()
            self._salted.clear()


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be served."""

    model: Model
    methods: Methods
    settings: EngineSettings
    fingerprint: str
    defaults: Mapping[str, Any]
    """Sampling defaults by field; see `serve.defaults`."""
    file_bytes: int = 0
    """Size of the model's files."""

    def make_engine(self) -> Engine:
        """A new engine. Called in the engine's thread, again after a crash."""
        self.methods.clear()
        return self.model.engine(self.methods.get(self.methods.default), every_method=True, **vars(self.settings))

    def describe_method(self, request: Request) -> dict[str, Any]:
        """What decodes a request, as its answer says."""
        method = self.method_of(request)
        return {"method": method.name, "lossless": method.lossless}

    def method_of(self, request: Request) -> AnyMethod:
        """What decodes a request."""
        plain = request.max_drafts == 0
        name = PLAIN if plain else self.methods.default
        return self.methods.get(name) if request.method is None else request.method

    def method_name(self, request: Request) -> str:
        """Name of what decodes a request."""
        return self.method_of(request).name
