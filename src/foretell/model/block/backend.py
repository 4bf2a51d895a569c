"""Backends: what computes the forward passes of a model, and which guarantees its results have."""

from dataclasses import asdict, dataclass

ARITHMETIC = {
    "float32": "float32 throughout",
    "bfloat16": "bfloat16 weights, cache and inputs of products; float32 residual stream, norms, softmax and logits",
    "int8": (
        "int8 weights and int8 activations, Hadamard-rotated, one scale per 192 inputs; "
        "bfloat16 embedding and cache; float32 residual stream, norms, softmax and logits"
    ),
    "int8-activations": (
        "int8 activations, one scale per 32 inputs, times quantised weights as the file has them; "
        "bfloat16 other weights and cache; float32 residual stream, norms, softmax and logits"
    ),
}
"""Arithmetic of each precision; the same on every backend up to rounding."""

_CACHE = "; but cached keys and values are {}, Hadamard-rotated, one scale per token and head"
_KIVI = "; but older cached keys and values are {} in groups of 32, keys per dimension and values per token"


@dataclass(frozen=True)
class Backend:
    """A backend, and the device and precision it runs on."""

    name: str
    """`native` (the CPU kernels), `torch`, `transformers`, or the name of a custom runner."""
    device: str = "cpu"
    precision: str = "float32"
    """float32, bfloat16, int8 or int8-activations; see `ARITHMETIC`."""
    instructions: str = ""
    """Vector instructions that the CPU kernels were compiled for."""
    batch_invariant: bool = False
    """A token's result does not depend, bit for bit, on the other tokens of its pass; otherwise only up to rounding."""

    cache_dtype: str = "auto"
    """Numbers of cached keys and values; `auto`: as `precision` says."""

    cache_policy: str = ""
    """What evicts keys and values of long texts, or leaves them unread, which is lossy; empty: nothing."""

    sparsity: str = ""
    """How tokens choose the neurons that they read, and the price, which is lossy; empty: they read all."""

    attention: str = ""
    """What attends to cached keys and values, where a device has several: see `attention_kinds`; empty: the backend."""

    @property
    def lossy(self) -> bool:
        """Whether the numbers are not those of the model in its arithmetic."""
        return bool(self.cache_policy or self.sparsity)

    @property
    def arithmetic(self) -> str:
        """How numbers are stored and multiplied, in one sentence."""
        known = ARITHMETIC.get(self.precision) if self.name in ("native", "torch") else None
        said = known or f"{self.precision}, as {self.name} computes it".lstrip(", ")
        if self.cache_dtype == "auto":
            return said
        number, _, kind = self.cache_dtype.partition("-")
        return said + (_KIVI if kind == "kivi" else _CACHE).format(number)

    def to_dict(self) -> dict[str, object]:
        """As a dictionary for JSON."""
        return asdict(self) | {"arithmetic": self.arithmetic}

    @property
    def _cache(self) -> str:
        words = ("" if self.cache_dtype == "auto" else self.cache_dtype), self.cache_policy
        return " ".join([*filter(None, words), "cache"]) if any(words) else ""

    @property
    def _attending(self) -> str:
        return f"{self.attention} attention" if self.attention not in ("", self.name) else ""

    @property
    def _sparse(self) -> str:
        return f"sparse ({self.sparsity.split(':')[0]})" if self.sparsity else ""

    def __str__(self) -> str:
        return " ".join(
            part
            for part in (
                self.name,
                self.instructions,
                self._attending,
                self.device,
                self.precision,
                self._cache,
                self._sparse,
            )
            if part
        )
