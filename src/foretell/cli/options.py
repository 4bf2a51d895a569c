"""Command-line options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MODEL = "smollm2-135m"

Model = Annotated[
    str,
    typer.Option(
        metavar="REF", help="Model: smollm2-135m, a directory (config.json, safetensors), a .gguf file, or a hub id."
    ),
]
Method = Annotated[
    str | None, typer.Option(metavar="NAME", help="Decoding method; see `foretell methods`. Default: auto.")
]
DraftModel = Annotated[
    list[str] | None,
    typer.Option("--draft-model", metavar="REF", help="Draft model, or a trained speculator, by REF; repeatable."),
]
Reference = Annotated[
    list[Path] | None, typer.Option("--reference", metavar="FILE", help="Reference document to draft from; repeatable.")
]
SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='Method and options (`foretell methods NAME` lists them), for example \'{"method": "ngram"}\'.',
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, float32, bfloat16, int8, int8-activations (quantised files) or int4 (rounds files of floats).",
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(metavar="T", help="Sampling temperature; 0: greedy.")]
TopK = Annotated[int, typer.Option(metavar="K", help="Sample among the K most probable tokens; 0: all.")]
TopP = Annotated[float, typer.Option(metavar="P", help="Sample among the fewest tokens with this total probability.")]
MinP = Annotated[float, typer.Option(metavar="P", help="Leave out tokens below this share of the highest probability.")]
RepetitionPenalty = Annotated[float, typer.Option(metavar="X", help="Above 1: less repetition of prompt and answer.")]
PresencePenalty = Annotated[
    float, typer.Option(metavar="X", help="Subtracted once from the logit of every token in the answer.")
]
FrequencyPenalty = Annotated[float, typer.Option(metavar="X", help="Subtracted for every occurrence in the answer.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Equal seeds give equal answers in every batch.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="S", help="End before this text; repeatable.")]
StopTokenId = Annotated[
    list[int] | None, typer.Option("--stop-token-id", metavar="ID", help="End at this token; repeatable.")
]
IncludeStop = Annotated[
    bool, typer.Option("--include-stop", help="Show the stop string or stop token that ends the answer.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence token.")]
MinTokens = Annotated[int, typer.Option(metavar="N", help="Fewest tokens of an answer.")]
BadWord = Annotated[
    list[str] | None, typer.Option("--bad-word", metavar="S", help="A word that must not occur; repeatable.")
]
AllowedTokenId = Annotated[
    list[int] | None,
    typer.Option("--allowed-token-id", metavar="ID", help="The only tokens that an answer may hold; repeatable."),
]
ShowSpecialTokens = Annotated[bool, typer.Option("--show-special-tokens", help="Show special tokens in the text.")]
JsonSchema = Annotated[
    Path | None, typer.Option("--json-schema", metavar="FILE", help="Answer with JSON that fits this schema.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[str | None, typer.Option(metavar="RE", help="Answer with text that this expression matches.")]
Choice = Annotated[
    list[str] | None, typer.Option("--choice", metavar="S", help="Answer with one of these texts; repeatable.")
]
Grammar = Annotated[Path | None, typer.Option(metavar="FILE", help="Answer by this grammar: Lark, or GBNF.")]
AnyWhitespace = Annotated[
    bool, typer.Option("--any-whitespace", help="Allow blanks and line ends in JSON; otherwise it is compact.")
]
Plan = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|JSON",
        help="Lossy: write the answer's parts side by side, for example skeleton, or "
        '\'{"type": "skeleton", "max_points": 5}\'.',
    ),
]
TopLogprobs = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="The same with the N most probable tokens in each place (with --json)."),
]
PromptLogprobs = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="The same for the tokens of the prompt (with --json).")
]
System = Annotated[str | None, typer.Option(metavar="S", help="System message.")]
AllowSpecialTokens = Annotated[
    bool,
    typer.Option("--allow-special-tokens", help="Encode the text of a special token in a message as that token."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        metavar="MIB",
        min=1,
        help="Most memory for the target's weights; the rest is read from disk in every pass (see docs/offload.md).",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="N",
        min=1,
        help="Tokens of prompt and answer that the model is opened for. Default: its trained context.",
    ),
]
RopeScaling = Annotated[
    str | None,
    typer.Option(
        "--rope-scaling",
        metavar="JSON",
        help='Scaling of rotary positions for longer texts, for example \'{"rope_type": "yarn", "factor": 4.0}\'.',
    ),
]
PreTokenizer = Annotated[
    str | None,
    typer.Option(
        "--pre-tokenizer",
        metavar="NAME",
        help="Cut texts as llama.cpp's pre-tokenizer of this name does, in place of the one that a GGUF file names.",
    ),
]
ChatTemplateDate = Annotated[
    str | None,
    typer.Option(
        "--chat-template-date",
        metavar="DATE",
        help="The date that chat templates write, as 2026-03-04. Default: that of the day.",
    ),
]
KvCachePolicy = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-policy",
        metavar="NAME@BUDGET",
        help=(
            "Lossy: evict keys and values beyond a budget (streaming_llm, snapkv, tova or h2o), or let every token "
            "read so many (quest)."
        ),
    ),
]
Sparsity = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Lossy: tokens read a part of the neurons, as DIR of `foretell calibrate sparsity` or `foretell train "
        "sparsity` says.",
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="NAME",
        help="Cached keys and values: auto (as the model computes), int8 (half the bytes of bfloat16), int8-halves "
        "(int8, whose upper halves drafts may read), int4 (a quarter), or int4-kivi and int2-kivi (4 and 2 bits in "
        "groups of 32 tokens, the last 128 tokens whole).",
    ),
]


def split_commas(text: str) -> list[str]:
    """Parts of a comma-separated option."""
    return [w.strip() for w in text.split(",") if w.strip()]
