"""Options of a target, which the command line shows and files of results keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from foretell.utils.options import Option


@dataclass(frozen=True)
class TargetOptions:
    """How a target is loaded for long texts and for cheaper passes, as `foretell.load` says; `rope_scaling` as JSON,
    `chat_template_date` in the form of ISO 8601.
    """

    max_model_len: Annotated[
        int | None,
        Option("Tokens of prompt and answer that the model is opened for. Default: its trained context.", "N", least=1),
    ] = None
    rope_scaling: Annotated[
        str | None,
        Option('Scaling of rotary positions for longer texts, as \'{"rope_type": "yarn", "factor": 4.0}\'.', "JSON"),
    ] = None
    lora: Annotated[
        Sequence[str],
        Option(
            "A LoRA adapter that is merged into the model: a directory of PEFT, or an adapter's .gguf file. With NAME= "
            "`foretell serve` keeps it beside the model, for the requests that name it. Repeatable.",
            "[NAME=]PATH",
        ),
    ] = ()
    pre_tokenizer: Annotated[
        str | None,
        Option("Cut texts as llama.cpp's pre-tokenizer of this name, not as the one that a GGUF file names.", "NAME"),
    ] = None
    chat_template_date: Annotated[
        str | None, Option("The date that chat templates write, as 2026-03-04. Default: that of the day.", "DATE")
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Option(
            "Cached keys and values: auto (as the model computes), int8 (half the bytes of bfloat16), int8-halves "
            "(int8, whose upper halves drafts may read), fp8 (8-bit floats, on GPUs), int4 (a quarter), or int4-kivi "
            "and int2-kivi (4 and 2 bits in groups of 32 tokens, the last 128 tokens whole).",
            "NAME",
        ),
    ] = "auto"
    kv_cache_policy: Annotated[
        str | None,
        Option(
            "Lossy: evict keys and values beyond a budget (streaming_llm, snapkv, tova or h2o), or let every token "
            "read so many (quest).",
            "NAME@BUDGET",
        ),
    ] = None
    sparsity: Annotated[
        Path | None,
        Option(
            "Lossy: tokens read a part of the neurons, as DIR of `foretell calibrate sparsity` or `foretell train "
            "sparsity` says.",
            "DIR",
        ),
    ] = None
    tensor_parallel: Annotated[
        int,
        Option(
            "Share every layer among N processes that torchrun started with this command (see "
            "docs/howto/scale-out.md).",
            "N",
            least=1,
        ),
    ] = 1
    pipeline_parallel: Annotated[
        int, Option("The same with N parts of the list of layers, for memory.", "N", least=1)
    ] = 1
    adapters: Sequence[str] = ()


PLAIN_TARGET = TargetOptions()
"""A target as it is."""
