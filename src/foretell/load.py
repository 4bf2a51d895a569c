"""Loads models: the embedded one, a directory, a GGUF file, or a repository of the Hugging Face hub."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from foretell.api import Model
from foretell.core.target_options import TargetOptions
from foretell.model.cache.policy import CachePolicy, parse_target_policy
from foretell.model.config.model import CacheDtype, ModelConfig, with_context, with_rope_scaling
from foretell.model.config.readers.compressed import check_card
from foretell.model.config.readers.hf import IMAGE_READERS, from_hf, is_decoder_family
from foretell.model.config.readers.values import eos_token_ids
from foretell.model.diffusion.config import is_diffusion
from foretell.model.kernels.structures import LANES, PRECISIONS, Precision
from foretell.model.load.adapter import adapter_name, with_adapter
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.images import VisionLanguage
from foretell.model.load.memory import check_memory
from foretell.model.load.native import packed_bytes, weight_dtype
from foretell.model.load.network import (
    build_network,
    build_streamed_network,
    choose_precision,
    parse_device,
    runs_on_kernels,
)
from foretell.model.load.placed import build_placed_network
from foretell.model.load.quantization_config import parse_quantization, refuse_quantization
from foretell.model.load.quantized import QuantizedWeights
from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
from foretell.model.load.rounding import RoundedWeights
from foretell.model.load.split import WHOLE, Split, load_split
from foretell.model.load.transformers import HFRunner, load_hf, model_config_of, reads_images
from foretell.model.load.transforms import DecoderTransform
from foretell.model.load.weights import SafetensorsWeights, Weights
from foretell.model.offload.sparsity_file import directory_of, read_sparsity
from foretell.model.run.compact_runner import check_compactible
from foretell.model.run.network import Network
from foretell.model.run.runner import Runner
from foretell.speculator.formats.files import missing_weights
from foretell.speculator.load import is_speculator
from foretell.tokenizer.codec import TextCodec, from_directory
from foretell.tokenizer.directory import require_tokenizer
from foretell.tokenizer.gguf import codec_from_gguf
from foretell.utils.names import unknown
from foretell.utils.validation import Fields, parse_object, read_json

log = logging.getLogger(__name__)
DTYPES = ("auto", *PRECISIONS, "int4")
"""Values of `dtype`."""
_FOR_SOME_FILES = ("int4", "int8-activations")
"""Values that only quantised files, or only others, have; a draft model takes `auto` in their place."""


def load(
    reference: str = DEFAULT_MODEL,
    dtype: str = "auto",
    device: str = "cpu",
    memory_limit: int | None = None,
    max_model_len: int | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    kv_cache_dtype: str = "auto",
    kv_cache_policy: str | None = None,
    sparsity: str | Path | None = None,
    pre_tokenizer: str | None = None,
    chat_template_date: datetime | None = None,
    lora: str | Path | Sequence[str | Path] | None = None,
    adapters: Sequence[str] = (),
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> Model:
    """Load a model.

    `reference`: the alias `smollm2-135m`, a directory with config.json and safetensors, a `.gguf` file, or a hub id
    (`owner/name`; nothing is downloaded otherwise). `dtype`: float32, bfloat16, int8, int8-activations or
    int4, whose arithmetic `foretell.model.block.backend` states, or auto. The numbers of a quantised file are kept in
    float32 and bfloat16; int8-activations, its fastest way, rounds the inputs of products, so it changes the target's
    distribution, as int8 does, which rounds the weights too. int4 rounds the weights of an unquantised checkpoint to
    the nearest of 16 levels per group of 32, and then is int8-activations. auto: int8-activations for a quantised file
    on the CPU kernels, float32 for a float32 file, else bfloat16.
    `device`: cpu or cuda. `memory_limit`: bytes that the weights may take; blocks
    beyond it are read from the file in every pass, which makes a pass slow. `max_model_len`: tokens of prompt and
    answer that the model is opened for; it decides the scaling of `dynamic` and `longrope` positions (default: of
    `longrope` the context before scaling, else all that the positions are trained for). `rope_scaling`: other scaling
    of rotary positions, with the keys of Hugging Face files, for example `{"rope_type": "yarn", "factor": 4.0}`.
    `kv_cache_dtype`: `int8`, `fp8` (on GPUs) and `int4` keep keys and values in 8 and 4 bits, one scale per token and
    head, which changes the target's distribution; `int8-halves` has the numbers of int8, of which drafts may read the
    upper halves alone; `int4-kivi` and `int2-kivi` round keys per dimension over 32 tokens (KIVI, arXiv 2402.02750) and
    keep the last 128 tokens whole; `auto` keeps them as the model computes.
    `kv_cache_policy`: `streaming_llm@BUDGET`, `snapkv@BUDGET`, `tova@BUDGET` or `h2o@BUDGET` keeps about so many keys
    and values per layer and head while an answer is decoded, and evicts the others; with `quest@BUDGET` every token
    selects so many to read, and all are kept. Answers are lossy then. None: all are kept and read.
    `sparsity`: a directory of `foretell calibrate sparsity` or `foretell train sparsity`: tokens read a part of the
    neurons of feed-forward networks, so answers are lossy. With `memory_limit` the neurons that are needed most often
    are in memory and the others in a mapped file, which `foretell calibrate placement` makes. None: they read all.
    `pre_tokenizer`: llama.cpp's name of the pre-tokenizer of a GGUF file, in place of the one that the file names.
    `chat_template_date`: the date that chat templates are told; None: that of the day.
    `lora`: adapters that are merged into the weights while they are read, directories of PEFT or GGUF files, also as
    NAME=PLACE; the file of the model stays as it is. Matrices that they change are not quantised afterwards.
    `adapters`: adapters as NAME=PLACE, of which a `Request` names its own.
    `tensor_parallel`: processes, started by `torchrun`, that share every layer; `pipeline_parallel`: parts of the list
    of layers, a process each; not both. The call returns in the first process only; the others run their parts until
    it ends, and exit.
    Such models, and architectures that the own decoder does not support, run through transformers, more slowly (extra
    `hf`).

    Raises:
        ValueError: the reference, dtype or device is unknown, the checkpoint is incomplete or damaged, the limit is too
            small, or the processes are not as many as the parts.
    """
    for name, value, known in (("dtype", dtype, DTYPES), ("kv_cache_dtype", kv_cache_dtype, get_args(CacheDtype))):
        if value not in known:
            raise unknown(name, value, known)
    policy = None if kv_cache_policy is None else parse_target_policy(kv_cache_policy)
    torch_device = parse_device(device)
    path = resolve_reference(reference)
    merged = [str(lora)] if isinstance(lora, str | Path) else list(map(str, lora or ()))
    raw = _read_config(path)
    if raw is not None and pre_tokenizer is not None:
        raise ValueError(
            f"--pre-tokenizer {pre_tokenizer} is for GGUF files; the files of {path} say how texts are cut"
        )
    refuse_other_kinds(reference, path, raw)
    split = Split(tensor_parallel, pipeline_parallel)
    if raw is None and split != WHOLE:
        raise ValueError(f"{reference}: transformers splits models in directories of safetensors, and this is GGUF")
    if raw is not None and (split != WHOLE or not is_decoder_family(raw)):
        options = memory_limit, rope_scaling, max_model_len, policy, sparsity, *merged, *adapters
        if kv_cache_dtype != "auto" or any(option is not None for option in options):
            raise ValueError(
                f"{reference}: memory_limit, rope_scaling, max_model_len, kv_cache_dtype, kv_cache_policy, sparsity "
                "and lora are for the own decoder; transformers runs models of other architectures and models in parts"
            )
        model = _load_with_transformers(reference, path, raw, dtype, torch_device, split)
        model.codec = replace(model.codec, template_date=chat_template_date)
        return model
    opened = open_checkpoint(path, raw, pre_tokenizer)
    for each in merged:
        own, changed = with_adapter(opened.config, opened.weights, each)
        opened = opened._replace(config=own, weights=changed)
    config = with_context(with_rope_scaling(opened.config, rope_scaling), max_model_len)
    config = _with_cache(reference, config, kv_cache_dtype, policy, device)
    precision = choose_precision(reference, dtype, config, opened.weights, torch_device)
    weights = RoundedWeights(opened.weights) if dtype == "int4" else opened.weights
    if memory_limit is None and runs_on_kernels(config, torch_device):
        check_memory(reference, precision, packed_bytes(config, weights, precision))
    checkpoint = _FileCheckpoint(config, weights, precision, torch_device)
    # The network in a thread that ends: while two threads keep threads of OpenMP, those of both sleep between kernels.
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(_load_network, checkpoint, None if sparsity is None else Path(sparsity), memory_limit)
        codec = opened.read_codec()
    network, variant = loading.result(), weights.variant or precision
    tokenizer = replace(codec, template_date=chat_template_date)
    eos = tuple(sorted({*opened.eos, *tokenizer.eos_ids}))
    name = " with ".join([reference, *merged])
    if adapters and not (kv_cache_policy is None and sparsity is None and memory_limit is None):
        raise ValueError(
            f"--lora {adapters[0]}: requests cannot choose adapters together with --kv-cache-policy, --sparsity or a "
            "limit of memory; give it without NAME=, which merges it for all"
        )
    plain = _FileCheckpoint(config, opened.weights, precision, torch_device)
    adapted = _adapted(plain, network, adapters, RoundedWeights if dtype == "int4" else lambda weights: weights)
    evicts = policy if policy is not None and not policy.selects else None
    vision = None
    if raw is not None and raw.get("model_type") in IMAGE_READERS:
        exact = device == "cpu" or precision == "float32"
        vision = VisionLanguage(path, _image_token(path, raw), torch_device, torch.float32 if exact else torch.bfloat16)
    return Model(name, config, tokenizer, network, variant, eos, checkpoint, evicts, vision, adapted)


def _with_cache(
    reference: str, config: ModelConfig, dtype: str, policy: CachePolicy | None, device: str
) -> ModelConfig:
    """The configuration with a cache of these numbers, of which tokens select keys where the policy says so."""
    if config.latent is not None and dtype != "auto":
        raise ValueError(f"{reference}: kv_cache_dtype {dtype} is not for multi-head latent attention; use auto")
    if dtype == "fp8" and device == "cpu":
        raise ValueError(f"{reference}: kv_cache_dtype fp8 is for GPUs; use int8, which has as many bytes")
    config = replace(config, cache_dtype=dtype)  # type: ignore[arg-type]
    check_cache_dtype(reference, config)
    if policy is None:
        return config
    check_compactible(config)
    return replace(config, page_budget=policy.budget) if policy.selects else config


def _adapted(
    checkpoint: "_FileCheckpoint", network: Network, adapters: Sequence[str], rounded: Callable[[Weights], Weights]
) -> dict[str, Network]:
    """The network with each of the adapters that requests choose among, by their names: beside its weights, or, where
    that is not possible, merged into a copy of them, of which `rounded` gives what is packed.
    """
    made, (config, weights, precision, device) = dict[str, Network](), checkpoint.parts
    for reference in adapters:
        name = adapter_name(reference).name
        if name is None or name in made:
            raise ValueError(f"--lora {reference}: adapters that requests choose need names of their own, as NAME=PATH")
        beside = checkpoint.adapted(network, reference)
        if beside is None:
            log.warning("%s: merged into a copy of the model, which takes its memory again", reference)
            adapted, merged = with_adapter(config, weights, reference)
            beside = build_network(adapted, rounded(merged), precision, device)
        made[name] = beside
    return made


def load_target(options: TargetOptions, model: str, dtype: str, device: str, memory_limit: int | None = None) -> Model:
    """Load a target with these options; see `load`."""
    scaling = None if options.rope_scaling is None else parse_object(options.rope_scaling, "--rope-scaling")
    date = None if options.chat_template_date is None else _parse_date(options.chat_template_date)
    own: dict[str, Any] = vars(options) | {"rope_scaling": scaling, "chat_template_date": date}
    return load(model, dtype, device, memory_limit, **own)


def _parse_date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"--chat-template-date must be a date as 2026-03-04 or 2026-03-04T05:06, found {text!r}"
        ) from None


def _load_network(checkpoint: "_FileCheckpoint", sparsity: Path | None, memory_limit: int | None) -> Network:
    """The network of a checkpoint, sparse and within a limit of memory where these are asked for."""
    parts, config = checkpoint.parts, checkpoint.config
    if sparsity is None:
        return build_network(*parts) if memory_limit is None else build_streamed_network(*parts, memory_limit)
    chosen = read_sparsity(sparsity, checkpoint.fingerprint(), config)
    if memory_limit is not None:
        return build_placed_network(*parts, chosen, directory_of(sparsity), memory_limit).network
    return checkpoint.sparse_network(build_network(*parts), chosen.rules, chosen.file.label)


def check_cache_dtype(reference: str, config: ModelConfig) -> None:
    """Check that heads can be split in two halves of whole vectors, where the numbers of the cache need that.

    Raises:
        ValueError: they cannot.
    """
    dims = {config.cache_sizes_of(i).head_dim for i in range(config.layers)}
    if config.cache_dtype not in ("auto", "int8", "fp8") and any(dim % (2 * LANES) for dim in dims):
        raise ValueError(
            f"{reference}: kv_cache_dtype {config.cache_dtype} needs heads of a multiple of {2 * LANES} numbers, and "
            f"this model has heads of {', '.join(map(str, sorted(dims)))}; use int8"
        )


def load_draft(reference: str, dtype: str = "auto", device: str = "cpu") -> Model | Path:
    """The draft model of this reference, or the directory of a trained speculator, which is read when its target is
    known. `dtype`: the target's; a draft model takes `auto` in place of int4 and int8-activations.

    Raises:
        ValueError: it is neither.
    """
    path = resolve_reference(reference)
    if is_speculator(path):
        return path
    if path.is_dir():
        _refuse_no_draft(path)
    return load(reference, "auto" if dtype in _FOR_SOME_FILES else dtype, device)


def _refuse_no_draft(path: Path) -> None:
    """Refuse a directory that is no speculator by its files, and no language model either."""
    raw = _read_config(path) or {}
    if not any(path.glob("*.safetensors")):
        raise ValueError(missing_weights(path))
    if "model_type" not in raw:
        raise ValueError(
            f"{path}: a draft model or a speculator was asked for, and this is no speculator in a known format "
            "(docs/formats.md lists them) and no language model, since config.json has no model_type"
        )


def resolve_dtype(reference: str, dtype: str, device: str) -> str:
    """The dtype that `auto` means for a model, or the given one.

    Raises:
        ValueError: as `load`.
    """
    if dtype != "auto":
        return dtype
    path = resolve_reference(reference)
    raw = _read_config(path)
    if raw is not None and not is_decoder_family(raw):
        return "bfloat16"
    opened = open_checkpoint(path, raw)
    return choose_precision(reference, dtype, opened.config, opened.weights, parse_device(device))


def refuse_other_kinds(reference: str, path: Path, raw: Mapping[str, Any] | None) -> None:
    """Refuse a masked diffusion model, or a speculator. `raw`: its configuration; None: a GGUF file.

    Raises:
        ValueError: it is one.
    """
    if raw is None:
        return
    if is_diffusion(raw):
        raise ValueError(
            f"{reference}: an autoregressive model was asked for, and this is a masked diffusion model "
            f"({raw['model_type']}), which does not predict the next token; decode it with foretell diffusion generate"
        )
    # Most speculators name the type of a language model; some checkpoints of a model hold its speculator, too.
    complete = "model_type" in raw and (path / "tokenizer.json").is_file()
    if not complete and is_speculator(path):
        raise ValueError(
            f"{reference}: a model was asked for, and this is a speculator, which drafts for one; name it with "
            "--draft-model, and its target with --model"
        )


class _FileCheckpoint(Checkpoint):
    """The weights of a loaded model, which can be read again."""

    def __init__(self, config: ModelConfig, weights: Weights, precision: Precision, device: torch.device) -> None:
        super().__init__(config, weights, device)
        self._precision = precision

    @property
    def parts(self) -> tuple[ModelConfig, Weights, Precision, torch.device]:
        """What a network is built of."""
        return self.config, self._weights, self._precision, self._device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model runs in; of an int8 model, that of its activations."""
        return weight_dtype(self._precision)

    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        """The network with changed weights."""
        precision: Precision = self._precision if dtype is None else dtype  # type: ignore[assignment]
        return build_network(self.config, self._weights, precision, self._device, change)


def load_codec(reference: str = DEFAULT_MODEL) -> TextCodec:
    """The tokenizer of a model alone; for references and errors see `load`."""
    path = resolve_reference(reference)
    return codec_from_gguf(GGUF(path).metadata) if path.is_file() else from_directory(path)


class OpenCheckpoint(NamedTuple):
    """A checkpoint of which no weight is read yet."""

    config: ModelConfig
    weights: Weights
    read_codec: Callable[[], TextCodec]
    """Reads the tokenizer."""
    eos: tuple[int, ...]
    """Tokens that end an answer."""


def open_checkpoint(
    path: Path, raw: Mapping[str, Any] | None = None, pre_tokenizer: str | None = None
) -> OpenCheckpoint:
    """Open a GGUF file or a directory. `raw`: the directory's configuration, if it was read before. `pre_tokenizer`:
    that of a GGUF file, in place of the one that it names.

    Raises:
        ValueError: see `load`.
    """
    raw, source = raw or _read_config(path), str(path / "config.json")
    if raw is None:
        file = GGUF(path)
        config = gguf_config(file)
        return OpenCheckpoint(
            config, GGUFWeights(file, config), partial(codec_from_gguf, file.metadata, pre_tokenizer), config.eos
        )
    check_card(path, raw)
    config, quantization = from_hf(raw, source), parse_quantization(raw, source)
    weights = SafetensorsWeights(path) if quantization is None else QuantizedWeights(path, quantization)
    weights.check_layers(config.layers)
    weights.check_tensors(config)
    config = weights.settle_head(config)
    require_tokenizer(path)
    return OpenCheckpoint(config, weights, partial(from_directory, path), _eos_tokens(path, config))


def _load_with_transformers(
    reference: str, path: Path, raw: Mapping[str, Any], dtype: str, device: torch.device, split: Split
) -> Model:
    """A model in parts, or of an architecture that the own decoder does not support, run by transformers."""
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"{reference}: {dtype} is for the own decoder; use --dtype float32 or bfloat16")
    dtype = "bfloat16" if dtype == "auto" else dtype
    refuse_quantization(raw, str(path))
    # Damaged shards, quantised tensors and layers too many are errors, which transformers does not check.
    weights = SafetensorsWeights(path)
    torch_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    runner: Callable[[], Runner]
    if split == WHOLE:
        model = load_hf(path, torch_dtype, device)
        runner = partial(HFRunner, model)
    else:
        model, runner = load_split(path, torch_dtype, device, split)
    config = model_config_of(model)
    weights.check_layers(config.layers)
    vision = None
    if split == WHOLE and reads_images(model):
        vision = VisionLanguage(path, _image_token(path, raw), device, model.dtype, model)
    codec = from_directory(path)
    eos = tuple(sorted({*_eos_tokens(path, config), *codec.eos_ids}))
    return Model(reference, config, codec, runner, dtype, eos, vision=vision)


def _image_token(path: Path, raw: Mapping[str, Any]) -> int:
    """The token in whose places a vision-language model reads images; -1: its configuration names none."""
    return Fields(raw, str(path / "config.json")).integer("image_token_id", "image_token_index", default=-1, least=-1)


def _read_config(path: Path) -> dict[str, Any] | None:
    """The configuration of the model in a directory; None: a GGUF file."""
    if path.is_file():
        return None
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path}: no config.json here; give a directory with config.json and safetensors, or a .gguf file"
        )
    return read_json(path / "config.json", "download it again")


def _eos_tokens(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """Ids of the tokens that end an answer: those of the configuration and of generation_config.json."""
    file = path / "generation_config.json"
    more = eos_token_ids(Fields(read_json(file, "download it again"), str(file))) if file.is_file() else ()
    return tuple(sorted({*config.eos, *more}))
