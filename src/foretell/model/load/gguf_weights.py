"""The tensors of a GGUF file by their Hugging Face names."""

import re

import torch

from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.gguf import from_gguf
from foretell.model.load.gguf import GGUF
from foretell.model.load.weights import HEAD, Storage, Weights
from foretell.model.matrices.stored import StoredMatrix

Tensor = torch.Tensor

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
        return None if self._place_in_file(HEAD) is None else self.matrix(HEAD, vocab, hidden)

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
