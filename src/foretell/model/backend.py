"""What computes the passes of a model, and what may be relied on in its results."""

from dataclasses import asdict, dataclass

ARITHMETIC = {
    "float32": "float32 throughout",
    "bfloat16": "bfloat16 weights, cache and inputs of products; float32 residual stream, norms, softmax and logits",
    "int8": (
        "int8 weights and int8 activations, Hadamard-rotated, one scale per 192 inputs; "
        "bfloat16 embedding and cache; float32 residual stream, norms, softmax and logits"
    ),
}
"""What the name of a precision stands for, on every backend. Backends differ by rounding only."""


@dataclass(frozen=True)
class Backend:
    """A way to run a model."""

    name: str
    """`native` (the CPU kernels), `torch`, `transformers`, or a name of your own."""
    device: str = "cpu"
    precision: str = "float32"
    """float32, bfloat16 or int8; see `ARITHMETIC`."""
    instructions: str = ""
    """Of the CPU kernels: the vector instructions that they were compiled for."""
    batch_invariant: bool = False
    """What is computed for a token is bit for bit independent of the tokens that share its pass; otherwise it is equal
    up to rounding.
    """

    @property
    def arithmetic(self) -> str:
        """How numbers are stored and multiplied, in one sentence."""
        known = ARITHMETIC.get(self.precision) if self.name in ("native", "torch") else None
        return known or f"{self.precision}, as {self.name} computes it".lstrip(", ")

    def to_dict(self) -> dict[str, object]:
        """As a dictionary for JSON."""
        return asdict(self) | {"arithmetic": self.arithmetic}

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.instructions, self.device, self.precision) if part)
