"""Quantised safetensors checkpoints: GPTQ, AWQ, compressed-tensors, FP8, MXFP4, NVFP4 and MLX."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float

from foretell.model.config.model import ModelConfig
from foretell.model.load.quantization_config import Quantization, Scheme
from foretell.model.load.quantized_formats import FORMATS, NOT_READ, QuantizedFormat, QuantizedModule
from foretell.model.load.quantized_matrix import QuantizedMatrix
from foretell.model.load.weights import SafetensorsWeights, Storage, Weights, candidate_names, refuse_quantized
from foretell.model.matrices.stored import StoredMatrix

Tensor = torch.Tensor
_WEIGHT = ".weight"


class QuantizedWeights(Weights):
    """A quantised checkpoint in safetensors: `get` widens, `matrix` keeps the bytes where a storage type holds them.

    Raises:
        ValueError: a tensor that the configuration does not explain, one that is missing, or a damaged file.
    """

    def __init__(self, path: Path, quantization: Quantization) -> None:
        self.source, self._quantization = str(path), quantization
        tensors: dict[str, tuple[Path, str]] = {}

        def note(file: Path, name: str, dtype: str) -> None:
            tensors[name] = (file, dtype)

        self._inner = SafetensorsWeights(path, note)
        self.mapped, self.files = self._inner.mapped, [*self._inner.files, path / "config.json"]
        self._modules: dict[str, tuple[QuantizedFormat, Scheme]] = {}
        for name, (file, dtype) in tensors.items():
            self._find_module(file, name, dtype)
        if not self._modules:
            raise ValueError(
                f"{path}: config.json says that the checkpoint is quantised with {quantization.method}, and none of "
                "its tensors is; download it again"
            )
        for module, (form, _) in self._modules.items():
            self._check_module(module, form, {name: dtype for name, (_, dtype) in tensors.items()})
        self.widened: dict[str, str] = {}
        """Why matrices were widened, by name; `matrix` adds to it."""

    def _find_module(self, file: Path, name: str, dtype: str) -> None:
        """Note the module that a tensor belongs to; refuse what belongs to none."""
        for _, scheme in self._quantization.schemes:
            for form in FORMATS[scheme.layout]:
                suffix = next((s for s in (*form.required, *form.optional) if name.endswith(s)), None)
                if suffix is None or (suffix == _WEIGHT and dtype not in form.required[suffix]):
                    continue
                module = name.removesuffix(suffix)
                own = self._quantization.scheme_of(module)
                if own is None or self._quantization.ignores(module):
                    raise ValueError(
                        f"{file}: {name} is quantised, and quantization_config says that {module} is not; "
                        "download it again"
                    )
                if own == scheme:
                    self._modules[module] = form, scheme
                    return
        if not name.endswith(NOT_READ):
            refuse_quantized(file, name, dtype)

    def _check_module(self, module: str, form: QuantizedFormat, dtypes: Mapping[str, str]) -> None:
        for suffix, allowed in {**form.required, **form.optional}.items():
            dtype = dtypes.get(module + suffix)
            if dtype is None and suffix in form.required:
                raise ValueError(f"{self.source}: the checkpoint has no {module}{suffix}; is it complete?")
            if dtype is not None and dtype not in allowed:
                raise ValueError(
                    f"{self.source}: {module}{suffix} is {dtype}, and its quantization_config asks for "
                    f"{' or '.join(allowed)}; download it again"
                )

    def _read(self, name: str) -> QuantizedMatrix | None:
        """The quantised matrix of this name; None: it is not quantised."""
        for candidate in candidate_names(name.removesuffix(_WEIGHT)):
            if candidate in self._modules:
                form, scheme = self._modules[candidate]
                return form.read(QuantizedModule(candidate, self._inner), scheme)
        return None

    def get(self, name: str) -> Float[Tensor, "*shape"] | None:
        """The tensor of this name, a quantised matrix in float32; None: there is none.

        Experts in MXFP4 have the shape that they have unquantised: experts, inputs, outputs.
        """
        if name.endswith(_WEIGHT):
            quantized = self._read(name)
            return self._inner.get(name) if quantized is None else quantized.widen()
        packed = self._read(name) if self._quantization.method == "mxfp4" else None
        if packed is None:
            return self._inner.get(name)
        wide = packed.widen().bfloat16()
        return wide.view(len(self._inner.get(name + "_scales")), -1, wide.shape[1]).transpose(1, 2)  # type: ignore[arg-type]

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape in the nearest storage type; of experts, their outputs as rows.

        Raises:
            ValueError: it is missing or has another shape.
        """
        quantized = self._read(name)
        if quantized is None:
            return self._inner.matrix(name, outputs, inputs)
        stored = quantized.stored()
        if isinstance(stored, str):
            self.widened[name] = stored
            stored = _narrowest(quantized.widen())
        self._checked(name, torch.empty(stored.shape, device="meta"), (outputs, inputs))
        return replace(stored, mapped=self.mapped)

    @property
    def storage(self) -> Storage:
        """Quantised."""
        return "quantized"

    def maps(self, name: str) -> bool:
        """Whether it is not quantised."""
        return all(candidate not in self._modules for candidate in candidate_names(name.removesuffix(_WEIGHT)))

    def check_layers(self, count: int) -> None:
        """See `SafetensorsWeights`."""
        self._inner.check_layers(count)

    def check_tensors(self, config: ModelConfig) -> None:
        """See `SafetensorsWeights`."""
        self._inner.check_tensors(config)

    def unread(self, config: ModelConfig) -> list[str]:
        """See `SafetensorsWeights`."""
        return self._inner.unread(config)

    def settle_head(self, config: ModelConfig) -> ModelConfig:
        """See `SafetensorsWeights`; a quantised head is one of its own."""
        own = any(name in self._modules for name in candidate_names("lm_head"))
        return replace(config, tied=False) if own else self._inner.settle_head(config)

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix:
        """The output matrix in the nearest storage type."""
        return self.matrix("lm_head.weight", vocab, hidden)

    def expert_matrices(self, name: str, count: int, outputs: int, inputs: int) -> Iterator[StoredMatrix]:
        """The matrices of all experts; of blocks, their bytes.

        Raises:
            ValueError: the tensor is missing or has another shape.
        """
        if self._read(name) is None:
            return self._inner.expert_matrices(name, count, outputs, inputs)
        whole = self.matrix(name, count * outputs, inputs)
        each = whole.data.view(count, outputs, -1)
        return (StoredMatrix(whole.kind, inputs, rows, self.mapped) for rows in each)

    def head(self, vocab: int, hidden: int) -> Tensor:
        """The output matrix; required, as in `SafetensorsWeights`.

        Raises:
            ValueError: it is missing or has another shape.
        """
        matrix: Tensor = self.require("lm_head.weight", vocab, hidden)
        return matrix


def _narrowest(values: Float[Tensor, "o i"]) -> StoredMatrix:
    """The numbers in bfloat16 where it holds them, else in float32."""
    narrow = values.bfloat16()
    return StoredMatrix.of(narrow if torch.equal(narrow.float(), values) else values)
