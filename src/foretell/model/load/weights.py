"""Builds a decoder from a checkpoint in safetensors or GGUF; nothing is unpickled."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from foretell.model.config import ModelConfig, from_gguf
from foretell.model.decoder import Decoder, DecoderBlock, FeedForward, RMSNorm
from foretell.model.linear import Linear
from foretell.model.load.gguf import GGUF
from foretell.model.load.quantization_config import QUANTIZED_ADVICE
from foretell.model.moe import ExpertFeedForward
from foretell.model.stored_matrix import StoredMatrix
from foretell.utils.validation import read_json

Tensor = torch.Tensor
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of readable weights, by their names in safetensors."""
_QUANTIZED = re.compile(
    r"(^|\.)(qweight|qzeros|g_idx|scales|SCB|absmax|quant_map|quant_state.*"
    r"|weight_(scale|packed|zero_point|shape|format).*"
    r"|.*(weight|input|output|[qkv])_scale(_inv|_\d)?)$"
)
"""Names of tensors that only quantised checkpoints have: of GPTQ, AWQ, bitsandbytes, FP8, compressed-tensors and
MLX.
"""
_HEAD = "lm_head.weight"
_AGAIN = "download it again"


class Weights(ABC):
    """The tensors of a checkpoint by their Hugging Face names, whatever its format."""

    source: str

    @abstractmethod
    def get(self, name: str) -> Float[Tensor, "*shape"] | None:
        """The tensor of this name, or None."""

    def require(self, name: str, *shape: int) -> Float[Tensor, "*shape"]:
        """The tensor of this name and shape.

        Raises:
            ValueError: it is missing or has another shape.
        """
        found = self.get(name)
        if found is None:
            raise ValueError(f"{self.source}: the checkpoint has no {name}; is it complete?")
        return self._checked(name, found, shape)

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape, as the file stores it.

        Raises:
            ValueError: it is missing or has another shape.
        """
        return StoredMatrix.of(self.require(name, outputs, inputs))

    def head(self, vocab: int, hidden: int) -> Float[Tensor, "v d"] | None:
        """The output matrix; None: it is tied to the embedding.

        Raises:
            ValueError: it has another shape, or is missing in a format that always has it.
        """
        found = self.get(_HEAD)
        return None if found is None else self._checked(_HEAD, found, (vocab, hidden))

    def _checked(self, name: str, found: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(found.shape) != shape:
            raise ValueError(
                f"{self.source}: {name} has shape {tuple(found.shape)}, the configuration asks for {shape}"
            )
        return found

    @abstractmethod
    def release_pages(self) -> None:
        """Return the file's memory pages to the system; later calls of `get` read them again."""


def refuse_quantized(file: Path, name: str, dtype: str) -> None:
    """Refuse a tensor of a quantised checkpoint: by its name, or a weight by its `dtype` (as safetensors names it)
    that is not a float of 16 bits or more.

    Raises:
        ValueError: the tensor belongs to a quantised checkpoint.
    """
    if _QUANTIZED.search(name) or (name.endswith(".weight") and dtype not in _FLOATS):
        raise ValueError(
            f"{file}: {name} ({dtype}) belongs to a quantised checkpoint, which is not supported; {QUANTIZED_ADVICE}"
        )


def candidate_names(name: str) -> tuple[str, ...]:
    """Names that a tensor or module has in checkpoints of a language model, and of a multimodal model that holds it."""
    return name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)


class SafetensorsWeights(Weights):
    """One `model.safetensors`, or shards with an index. `check(file, name, dtype)` is called for every tensor.

    Raises:
        ValueError: there is no safetensors file (a pickle is refused by name), it is damaged, or `check` refuses it.
    """

    def __init__(self, path: Path, check: Callable[[Path, str, str], None] = refuse_quantized) -> None:
        self.source = str(path)
        index = path / "model.safetensors.index.json"
        single = ["model.safetensors"] if (path / "model.safetensors").is_file() else []
        files = _shards(index) if index.is_file() else single
        if not files:
            pickles = [p.name for p in [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]]
            if pickles:
                raise ValueError(
                    f"{path}: only a pickle is here ({pickles[0]}), and unpickling can run code; "
                    "convert it to safetensors with `save_pretrained` of transformers"
                )
            raise ValueError(f"{path}: no model.safetensors here")
        self._files, self._path = files, path
        self._readers: dict[str, Callable[[str], Tensor]] = {}
        self._open(check)

    def _open(self, check: Callable[[Path, str, str], None] | None = None) -> None:
        path = self._path
        for name in self._files:
            try:
                handle = safe_open(path / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path / name}: missing or damaged safetensors file ({error}); download it again"
                ) from error
            for key in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (not a dict)
                self._readers[key] = handle.get_tensor
                if check is not None:
                    check(path / name, key, handle.get_slice(key).get_dtype())  # type: ignore[no-untyped-call]

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, or None."""
        for candidate in candidate_names(name):
            if candidate in self._readers:
                return self._readers[candidate](candidate)
        return None

    def head(self, vocab: int, hidden: int) -> Tensor:
        """The output matrix; required, because transformers would initialise a missing one at random.

        Raises:
            ValueError: it is missing or has another shape.
        """
        found: Tensor = self.require(_HEAD, vocab, hidden)
        return found

    def release_pages(self) -> None:
        """Reopen the files; an old mapping ends with the last tensor that uses it."""
        self._open()


def _shards(index: Path) -> list[str]:
    files = read_json(index, _AGAIN).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index}: weight_map should name a file for every tensor; {_AGAIN}")
    outside = next((name for name in files.values() if Path(name).name != name), None)
    if outside is not None:
        raise ValueError(f"{index}: weight_map names a file outside its directory ({outside!r}); {_AGAIN}")
    return sorted(set(files.values()))


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_GGUF_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GGUF_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_config(file: GGUF) -> ModelConfig:
    """The configuration of the model in a GGUF file.

    Raises:
        ValueError: see `codec_from_gguf`.
    """
    names = [n for n in ("rope_freqs", "rope_factors_short", "rope_factors_long") if f"{n}.weight" in file.tensors]
    factors = {n: file.load_tensor(f"{n}.weight").flatten().tolist() for n in names}
    return from_gguf(file.metadata, str(file.path), factors, tied="output.weight" not in file.tensors)


class GGUFWeights(Weights):
    """Tensors of a GGUF file, dequantised; llama.cpp's interleaved rotary order becomes the half-split order."""

    def __init__(self, file: GGUF, config: ModelConfig) -> None:
        self.source, self._file, self._config = str(file.path), file, config
        self._block = _GGUF_BLOCK | (_GGUF_GEMMA_NORMS if config.post_norms else _GGUF_NORMS)

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, or None."""
        gguf_name = self._name_in_file(name)
        if gguf_name is None:
            return None
        tensor: Tensor = self._file.load_tensor(gguf_name)
        return tensor[self._half_split_order(len(tensor))] if self._is_interleaved(name) else tensor

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape, as the file stores it: a view of the mapped file where rows keep their
        order. Storage types without a `Kind` are widened.
        """
        gguf_name = self._name_in_file(name)
        found = None if gguf_name is None else self._file.stored_matrix(gguf_name)
        if found is None or found.shape != (outputs, inputs):
            return super().matrix(name, outputs, inputs)
        return found.rows(self._half_split_order(outputs)) if self._is_interleaved(name) else found

    def _name_in_file(self, name: str) -> str | None:
        found = _GGUF_NAMES.get(name)
        if found is None:
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            stem, _, kind = rest.rpartition(".")
            found = f"blk.{layer}.{self._block.get(stem)}.{kind}"
        return found if found in self._file.tensors else None

    def _is_interleaved(self, name: str) -> bool:
        """Whether the rows of a head are in llama.cpp's order: pairs of the two halves."""
        return self._file.metadata["general.architecture"] == "llama" and name.split(".")[-2] in ("q_proj", "k_proj")

    def _half_split_order(self, rows: int) -> Tensor:
        return torch.arange(rows).view(-1, self._config.head_dim // 2, 2).transpose(1, 2).flatten()

    def release_pages(self) -> None:
        """Return the file's memory pages to the system."""
        self._file.release_pages()


def build_decoder(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build the decoder of a configuration from a checkpoint, in `dtype` on `device`.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    # Fails early on a configuration with too many layers.
    weights.require(f"model.layers.{config.layers - 1}.input_layernorm.weight", config.hidden)
    with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as pool:
        outer = pool.submit(lambda: build_without_blocks(config, weights, dtype, device))
        blocks = list(pool.map(lambda i: build_block(config, i, weights, dtype, device), range(config.layers)))
    return Decoder(config, outer.result().embedding.data, blocks, outer.result().norm, outer.result().head)


def build_without_blocks(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build a decoder with embedding, final norm and head, and no blocks."""
    embedding = weights.require("model.embed_tokens.weight", config.vocab, config.hidden).to(device, dtype)
    norm = _norm(config, weights, "model.norm", config.hidden, device)
    head = None if config.tied else weights.head(config.vocab, config.hidden)
    return Decoder(config, embedding, [], norm, None if head is None else Linear(head.to(device, dtype)))


def build_block(
    config: ModelConfig, i: int, weights: Weights, dtype: torch.dtype, device: torch.device
) -> DecoderBlock:
    """Build block `i`."""
    c, prefix = config, f"model.layers.{i}."
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    def matrix(name: str, outputs: int, inputs: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = weights.require(f"{prefix}{name}.weight", outputs, inputs)
        return weight, weights.require(f"{prefix}{name}.bias", outputs) if bias else None

    def stack(*parts: tuple[Tensor, Tensor | None]) -> Linear:
        biases = [b for _, b in parts if b is not None]
        return Linear(place(torch.cat([w for w, _ in parts])), place(torch.cat(biases)) if biases else None)

    def norm(name: str, width: int) -> RMSNorm:
        return _norm(c, weights, prefix + name, width, device)

    attention = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    mlp: FeedForward | ExpertFeedForward
    if c.experts is not None and i in c.experts.layers:
        mlp = _experts(c, prefix, weights, place)
    else:
        mlp = FeedForward(
            stack(*(matrix(f"mlp.{n}", c.ffn, c.hidden, c.mlp_bias) for n in ("gate_proj", "up_proj"))),
            stack(matrix("mlp.down_proj", c.hidden, c.ffn, c.mlp_bias)),
            c.activation,
        )
    return DecoderBlock(
        attention_norm=norm("input_layernorm", c.hidden),
        qkv=stack(*(matrix(f"self_attn.{n}", width, c.hidden, c.qkv_bias) for n, width in attention.items())),
        output=stack(matrix("self_attn.o_proj", c.hidden, q, c.output_bias)),
        mlp_norm=norm("pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm", c.hidden),
        mlp=mlp,
        q_norm=norm("self_attn.q_norm", c.head_dim) if c.qk_norm else None,
        k_norm=norm("self_attn.k_norm", c.head_dim) if c.qk_norm else None,
        post_attention_norm=norm("post_attention_layernorm", c.hidden) if c.post_norms else None,
        post_mlp_norm=norm("post_feedforward_layernorm", c.hidden) if c.post_norms else None,
    )


def _norm(config: ModelConfig, weights: Weights, name: str, width: int, device: torch.device) -> RMSNorm:
    return RMSNorm(weights.require(name + ".weight", width).to(device), config.norm_eps, config.norm_offset)


def _experts(
    config: ModelConfig, prefix: str, weights: Weights, place: Callable[[Tensor], Tensor]
) -> ExpertFeedForward:
    c, experts = config, config.experts
    assert experts is not None
    if c.architecture == "mixtral":
        prefix, names = prefix + "block_sparse_moe.", ("w1", "w3", "w2")
    else:
        prefix, names = prefix + "mlp.", ("gate_proj", "up_proj", "down_proj")

    def gate_up_down(name: str, width: int) -> tuple[Tensor, Tensor]:
        gate, up = (weights.require(f"{name}{n}.weight", width, c.hidden) for n in names[:2])
        return place(torch.cat([gate, up])), place(weights.require(f"{name}{names[2]}.weight", c.hidden, width))

    each = [gate_up_down(f"{prefix}experts.{j}.", experts.ffn) for j in range(experts.count)]
    shared = None
    if experts.shared_ffn:
        gate_up, down = gate_up_down(f"{prefix}shared_expert.", experts.shared_ffn)
        gate = weights.require(f"{prefix}shared_expert_gate.weight", 1, c.hidden) if experts.shared_gate else None
        shared = Linear(gate_up), Linear(down), None if gate is None else Linear(place(gate))
    router = Linear(place(weights.require(f"{prefix}gate.weight", experts.count, c.hidden)))
    return ExpertFeedForward(
        experts, router, torch.stack([e[0] for e in each]), torch.stack([e[1] for e in each]), shared
    )
