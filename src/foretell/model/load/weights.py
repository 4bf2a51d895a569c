"""Builds a decoder from a checkpoint in safetensors or GGUF; nothing is unpickled."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float

from foretell.model.config import ModelConfig, from_gguf
from foretell.model.decoder import Decoder, DecoderBlock, FeedForward, RMSNorm
from foretell.model.expert_matrices import GatedMatrices
from foretell.model.latent import LatentBlock
from foretell.model.linear import Linear
from foretell.model.load.experts import read_expert_layer
from foretell.model.load.gguf import GGUF
from foretell.model.load.latent import read_latent_projection
from foretell.model.load.layer_parts import (
    INTERLEAVED,
    attention_inputs,
    build_beside_dense,
    build_layer_input,
    build_layer_inputs,
    half_split_order,
    layer_scale,
    unit_norm,
)
from foretell.model.load.quantization_config import QUANTIZED_ADVICE
from foretell.model.load.safetensors_file import SafetensorsFile
from foretell.model.load.state_blocks import build_state_parts
from foretell.model.moe import DenseAndExperts, ExpertFeedForward
from foretell.model.stored_matrix import Matrix, StoredMatrix
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


Storage = Literal["quantized", "float32", "half"]
"""How a checkpoint stores its matrices: as quantised blocks, in float32, or in a float of 16 bits."""


class Weights(ABC):
    """The tensors of a checkpoint by their Hugging Face names, whatever its format."""

    source: str
    files: Sequence[Path] = ()
    """Files that the tensors come from; none: they are made up."""

    variant = ""
    """What distinguishes the weights from others of the same files."""

    @property
    def storage(self) -> Storage:
        """How the matrices of the blocks are stored, most of them."""
        return "float32"

    def maps(self, name: str) -> bool:
        """Whether `matrix` gives this one as a view of a mapped file, so that keeping it takes no memory."""
        return False

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
        return StoredMatrix.of(self.require(name, outputs, inputs), self.release_pages)

    def expert_matrices(self, name: str, count: int, outputs: int, inputs: int) -> Iterator[StoredMatrix]:
        """The matrices of all experts, one after the other, from one tensor: floats [experts, inputs, outputs].

        Raises:
            ValueError: it is missing or has another shape.
        """
        whole = self.require(name, count, inputs, outputs)
        return (StoredMatrix.of(each.T, self.release_pages) for each in whole)

    def head(self, vocab: int, hidden: int) -> Float[Tensor, "v d"] | None:
        """The output matrix; None: it is tied to the embedding.

        Raises:
            ValueError: it has another shape, or is missing in a format that always has it.
        """
        found = self.get(_HEAD)
        return None if found is None else self._checked(_HEAD, found, (vocab, hidden))

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix | None:
        """As `head`, but as the file stores it."""
        found = self.head(vocab, hidden)
        return None if found is None else StoredMatrix.of(found, self.release_pages)

    def output_matrix(self, config: ModelConfig) -> StoredMatrix:
        """The output matrix as the file stores it; the embedding where the two are tied."""
        own = None if config.tied else self.head_matrix(config.vocab, config.hidden)
        return self.matrix("model.embed_tokens.weight", config.vocab, config.hidden) if own is None else own

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
    """Names that a tensor or module has in checkpoints of a language model, and of a multimodal model that holds it.

    Nemotron-H calls the model `backbone`, and its embedding `embeddings`.
    """
    multimodal = f"language_model.{name}", name.replace("model.", "model.language_model.", 1)
    backbone = name.replace("embed_tokens", "embeddings")
    return name, *multimodal, backbone.replace("model.", "backbone.", 1), backbone


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
        self.files = [path / name for name in files]
        self._mapped = [SafetensorsFile(file) for file in self.files]
        self._file_of = {name: file for file in self._mapped for name in file.dtypes}
        for file in self._mapped:
            for name, dtype in file.dtypes.items():
                check(file.path, name, dtype)

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, or None."""
        for candidate in candidate_names(name):
            if candidate in self._file_of:
                found: Tensor = self._file_of[candidate].tensor(candidate)
                return found
        return None

    @property
    def storage(self) -> Storage:
        """By the embedding, which is there in every checkpoint."""
        table = self.get("model.embed_tokens.weight")
        return "float32" if table is not None and table.dtype == torch.float32 else "half"

    def maps(self, name: str) -> bool:
        """True: all tensors are views."""
        return True

    def head(self, vocab: int, hidden: int) -> Tensor:
        """The output matrix; required, because transformers would initialise a missing one at random.

        Raises:
            ValueError: it is missing or has another shape.
        """
        found: Tensor = self.require(_HEAD, vocab, hidden)
        return found

    def release_pages(self) -> None:
        """Return the files' memory pages to the system."""
        for file in self._mapped:
            file.release_pages()


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
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_GGUF_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_GGUF_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_GGUF_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GGUF_GPT_OSS_NORMS = {"post_attention_layernorm": "post_attention_norm"}
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


def gguf_place(name: str, config: ModelConfig) -> tuple[str, int | None]:
    """The name in GGUF of the tensor that holds this tensor of Hugging Face, and the index of the expert whose part it
    is; None: all of it.
    """
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name], None
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    stem, _, kind = rest.rpartition(".")
    if rest == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight", None
    part = _GGUF_EXPERT.fullmatch(stem)
    if part is not None:
        return f"blk.{layer}.{_GGUF_EXPERTS.get(part[2])}.{kind}", int(part[1])
    norms = _GGUF_GPT_OSS_NORMS if config.architecture == "gpt_oss" else _GGUF_NORMS
    block = _GGUF_BLOCK | (_GGUF_GEMMA_NORMS if config.post_norms else norms)
    return f"blk.{layer}.{block.get(stem)}.{kind}", None


class GGUFWeights(Weights):
    """Tensors of a GGUF file, dequantised; llama.cpp's interleaved rotary order becomes the half-split order."""

    def __init__(self, file: GGUF, config: ModelConfig) -> None:
        self.source, self._file, self._config = str(file.path), file, config
        self.files = [file.path]

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, or None."""
        place = self._place_in_file(name)
        if place is None:
            return None
        tensor: Tensor = self._file.load_tensor(*place)
        return tensor[self._half_split_order(len(tensor))] if self._is_interleaved(name) else tensor

    def require(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape; a matrix of one row may be stored as a vector.

        Raises:
            ValueError: it is missing or has another shape.
        """
        found = self.get(name)
        if found is not None and shape[0] == 1 and found.shape == shape[1:]:
            return found.unsqueeze(0)
        checked: Tensor = super().require(name, *shape)
        return checked

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix of this name and shape, as the file stores it: a view of the mapped file where rows keep their
        order. Storage types without a `Kind` are widened.
        """
        place = self._place_in_file(name)
        found = None if place is None else self._file.stored_matrix(*place)
        if found is None or found.shape != (outputs, inputs):
            return super().matrix(name, outputs, inputs)
        return found.rows(self._half_split_order(outputs)) if self._is_interleaved(name) else found

    @property
    def storage(self) -> Storage:
        """By the types of the tensors in the blocks."""
        return self._file.storage

    def maps(self, name: str) -> bool:
        """Whether the file stores it in one of the known kinds."""
        place = self._place_in_file(name)
        return place is not None and self._file.stored_matrix(*place) is not None

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix | None:
        """The output matrix as the file stores it; None: it is tied to the embedding."""
        return None if self._place_in_file(_HEAD) is None else self.matrix(_HEAD, vocab, hidden)

    def _place_in_file(self, name: str) -> tuple[str, int | None] | None:
        """The tensor that holds this one, and the index of the expert whose part it is."""
        found, expert = gguf_place(name, self._config)
        return (found, expert) if found in self._file.tensors else None

    def _is_interleaved(self, name: str) -> bool:
        """Whether the rows of a head are in llama.cpp's order: pairs of the two halves."""
        return self._file.metadata["general.architecture"] == "llama" and name.split(".")[-2] in ("q_proj", "k_proj")

    def _half_split_order(self, rows: int) -> Tensor:
        return torch.arange(rows).view(-1, self._config.head_dim // 2, 2).transpose(1, 2).flatten()

    def release_pages(self) -> None:
        """Return the file's memory pages to the system."""
        self._file.release_pages()


@dataclass(frozen=True)
class BlockNames:
    """Names of the modules of a block in its checkpoint."""

    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    state: str = "mamba"
    """Of Mamba-2."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    """The same as `gate`: one matrix holds the rows of both, or there is no gate."""
    down: str = "mlp.down_proj"
    final_norm: str = "model.norm"


_LFM2 = BlockNames(
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    final_norm="model.embedding_norm",
)
_GRANITE_HYBRID = BlockNames(
    gate="shared_mlp.input_linear", up="shared_mlp.input_linear", down="shared_mlp.output_linear"
)
_NEMOTRON = BlockNames(
    attention_norm="norm",
    mlp_norm="norm",
    attention="mixer",
    state="mixer",
    output="mixer.o_proj",
    gate="mixer.up_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    final_norm="model.norm_f",
)
_LLAMA4 = BlockNames(gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj")
_NAMES = {"lfm2": _LFM2, "granitemoehybrid": _GRANITE_HYBRID, "nemotron_h": _NEMOTRON, "llama4_text": _LLAMA4}
"""By architecture, where they are not those of Llama."""


def block_names(config: ModelConfig) -> BlockNames:
    """Names of the modules of a block in a checkpoint of this architecture."""
    return _NAMES.get(config.architecture, BlockNames())


def build_decoder(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build the decoder of a configuration from a checkpoint, in `dtype` on `device`.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    # Fails early on a configuration with too many layers.
    last = f"model.layers.{config.layers - 1}.{block_names(config).attention_norm}.weight"
    weights.require(last, config.hidden)
    with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as pool:
        outer = pool.submit(lambda: build_without_blocks(config, weights, dtype, device))
        blocks = list(pool.map(lambda i: build_block(config, i, weights, dtype, device), range(config.layers)))
    shell = outer.result()
    return Decoder(config, shell.embedding.data, blocks, shell.norm, shell.head, layer_inputs=shell.layer_inputs)


def build_without_blocks(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build a decoder with embedding, final norm and head, and no blocks."""
    embedding = weights.require("model.embed_tokens.weight", config.vocab, config.hidden).to(device, dtype)
    inputs = None if config.layer_inputs is None else build_layer_inputs(config, weights, dtype, device)
    norm = _norm(config, weights, block_names(config).final_norm, config.hidden, device)
    head = None if config.tied else weights.head(config.vocab, config.hidden)
    own = None if head is None else Linear(head.to(device, dtype))
    return Decoder(config, embedding, [], norm, own, layer_inputs=inputs)


def build_block(
    config: ModelConfig, i: int, weights: Weights, dtype: torch.dtype, device: torch.device
) -> DecoderBlock:
    """Build block `i`."""
    c, prefix = config, f"model.layers.{i}."
    sizes, ffn = c.sizes_of(i), c.ffn_of(i)
    q = c.heads * sizes.head_dim

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

    names = block_names(c)
    experts = _experts(c, prefix, weights, place) if c.experts is not None and i in c.experts.layers else None
    mlp: FeedForward | ExpertFeedForward | DenseAndExperts
    if i in c.mlp_free_layers:
        mlp = FeedForward(_nothing(c.hidden), _nothing(0), c.activation)
    elif experts is not None and c.experts is not None and not c.experts.beside_dense:
        mlp = experts
    else:
        rows = dict.fromkeys((names.gate, names.up), 2 * ffn if names.gate == names.up and c.gated else ffn)
        dense = FeedForward(
            stack(*(matrix(name, width, c.hidden, c.mlp_bias) for name, width in rows.items())),
            stack(matrix(names.down, c.hidden, ffn, c.mlp_bias)),
            c.activation,
        )
        mlp = dense if experts is None else build_beside_dense(c, prefix, weights, dense, experts, norm)
    if i in c.attention_free_layers:
        return DecoderBlock(
            attention_norm=RMSNorm(torch.empty(0), c.norm_eps),
            qkv=_nothing(c.hidden),
            output=_nothing(0),
            mlp_norm=norm(names.mlp_norm, c.hidden),
            mlp=mlp,
            residual_scale=c.residual_scale,
        )
    mlp_norm = "pre_feedforward_layernorm" if c.post_norms else names.mlp_norm
    if i in c.state_layers:
        parts = build_state_parts(c, lambda name, *shape: weights.require(prefix + name, *shape), place, names.state)
        return DecoderBlock(
            attention_norm=norm(names.attention_norm, c.hidden),
            qkv=parts.input,
            output=parts.output,
            mlp_norm=norm(mlp_norm, c.hidden),
            mlp=mlp,
            mixer=parts.mixer,
            residual_scale=c.residual_scale,
        )
    if c.latent is not None:
        return LatentBlock(
            attention_norm=norm(names.attention_norm, c.hidden),
            qkv=read_latent_projection(c, prefix, weights, place),
            output=stack(matrix(names.output, c.hidden, c.heads * c.latent.value_dim, False)),
            mlp_norm=norm(names.mlp_norm, c.hidden),
            mlp=mlp,
        )
    inputs = attention_inputs(c, i, names.attention)
    queries, *attention = (matrix(name, rows, c.hidden, c.qkv_bias) for name, rows in inputs)
    if c.attention_gate:
        queries, gate = _split_gate(queries, c.head_dim)
        attention.append(gate)
    if c.architecture in INTERLEAVED:
        queries, attention[0] = (half_split_order(part, c.head_dim) for part in (queries, attention[0]))
    reads_keys, unit = c.kv_layer_of(i) != i, c.unit_qk_norm and i not in c.unrotated_layers

    def head_norm(name: str) -> RMSNorm | None:
        if c.qk_norm:
            return norm(name, sizes.head_dim)
        return unit_norm(c, i, device) if unit else None

    return DecoderBlock(
        attention_norm=norm(names.attention_norm, c.hidden),
        qkv=stack(queries, *attention),
        output=stack(matrix(names.output, c.hidden, q, c.output_bias)),
        mlp_norm=norm(mlp_norm, c.hidden),
        mlp=mlp,
        q_norm=head_norm(names.q_norm),
        k_norm=None if reads_keys else head_norm(names.k_norm),
        v_norm=unit_norm(c, i, device) if c.value_norm and not reads_keys else None,
        reads_keys=reads_keys,
        layer_input=build_layer_input(c, lambda *of: stack(matrix(of[0], of[1], of[2], False)), norm)
        if c.layer_inputs
        else None,
        scale=layer_scale(c, prefix, weights),
        post_attention_norm=norm("post_attention_layernorm", c.hidden) if c.post_norms else None,
        post_mlp_norm=norm("post_feedforward_layernorm", c.hidden) if c.post_norms else None,
        attention_gate=c.attention_gate,
        residual_scale=c.residual_scale,
        sinks=weights.require(f"{prefix}self_attn.sinks", c.heads).float().to(device) if c.sinks else None,
    )


def _nothing(inputs: int) -> Linear:
    """A matrix without outputs: of a sub-layer that a block does not have."""
    return Linear(torch.empty(0, inputs))


def _split_gate(
    queries: tuple[Tensor, Tensor | None], head_dim: int
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """A query projection whose heads are [query; gate] as two projections."""

    def half(part: Tensor, which: int) -> Tensor:
        return part.view(-1, 2, head_dim, *part.shape[1:])[:, which].flatten(0, 1)

    weight, bias = queries
    first, second = ((half(weight, i), None if bias is None else half(bias, i)) for i in range(2))
    return first, second


def _norm(config: ModelConfig, weights: Weights, name: str, width: int, device: torch.device) -> RMSNorm:
    return RMSNorm(weights.require(name + ".weight", width).to(device), config.norm_eps, config.norm_offset)


def _experts(
    config: ModelConfig, prefix: str, weights: Weights, place: Callable[[Tensor], Tensor]
) -> ExpertFeedForward:
    c, experts = config, config.experts
    assert experts is not None

    def linear(matrices: Sequence[Matrix | None], *biases: Tensor | None) -> Linear:
        bias = [b for b in biases if b is not None]
        wide = [m.widen() if isinstance(m, StoredMatrix) else m for m in matrices if m is not None]
        return Linear(place(torch.cat(wide)), place(torch.cat(bias)) if bias else None)

    def gate_up(m: GatedMatrices) -> Linear:
        return linear((m.gate, m.up), m.gate_bias, m.up_bias)

    def unrounded(tensor: Tensor) -> Tensor:
        """A tensor of the router or of a gate, which stay in float32."""
        placed = place(tensor)
        return placed if placed.dtype == torch.float64 else tensor.to(placed.device, torch.float32)

    read = read_expert_layer(c, prefix, weights)
    each = [(gate_up(m), linear((m.down,), m.down_bias)) for m in read.experts]
    gate = None if read.shared_gate is None else Linear(unrounded(read.shared_gate))
    return ExpertFeedForward(
        experts,
        Linear(unrounded(read.router), None if read.router_bias is None else unrounded(read.router_bias)),
        [pair[0] for pair in each],
        [pair[1] for pair in each],
        None if read.shared is None else (gate_up(read.shared), linear((read.shared.down,)), gate),
        None if read.selection_bias is None else unrounded(read.selection_bias),
        c.activation,
        None if read.expert_scale is None else unrounded(read.expert_scale),
    )
