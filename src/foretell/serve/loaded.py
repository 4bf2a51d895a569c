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
from foretell.utils.names import unknown

PLAIN = "autoregressive"
ITL_TARGET = 0.25
"""Seconds between two tokens of an answer beside prompts that are read: a reader sees text come."""
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
class EngineSettings:
    """How the server's engines run; see `Engine`."""

    rows: int = 16
    """Requests that are decoded together."""
    prefix_caching: bool = True
    itl_target: float | None = ITL_TARGET
    """Seconds between two tokens of an answer that chunks of prompts leave room for; None: any."""
    cache_bytes: int | None = None
    """Greatest size of the target's key-value cache; None: any."""
    disable_by_batch_size: int | None = None
    """Other requests beside which a request gets no drafts; None: any number, the budget alone decides."""

    def engine(self, model: Model, method: AnyMethod) -> Engine:
        """A new engine of the model that decodes by `method`."""
        return model.engine(
            method,
            self.rows,
            self.prefix_caching,
            every_method=True,
            disable_by_batch_size=self.disable_by_batch_size,
            itl_target=self.itl_target,
            cache_bytes=self.cache_bytes,
        )


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
        return self.settings.engine(self.model, self.methods.get(self.methods.default))

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
