"""Storage types of matrices, and their blocks; what knows of these alone need not wait for torch."""

from typing import Literal, get_args

Kind = Literal[
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q4_Z", "NVFP4",
    "IQ4_NL", "IQ4_XS",
]  # fmt: skip
"""Storage types, by their names in GGUF. Two are ours. `Q4_Z`: 32 inputs in 20 bytes, float16 scale d and zero point z,
then 16 bytes of levels q in the order of Q4_0; a weight is d * (q - z). GPTQ and AWQ checkpoints become this type.
`NVFP4`: the factor of the matrix as float32, then a block of 64 inputs of GGUF, whose scales are numbers."""
KINDS: tuple[Kind, ...] = get_args(Kind)

BLOCKS: dict[Kind, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "MXFP4": (32, 17), "Q4_Z": (32, 20), "NVFP4": (64, 40), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip
"""Inputs per block, and bytes per block."""
