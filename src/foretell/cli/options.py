"""Options that several commands share, declared once."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MODEL = "smollm2-135m"

Model = Annotated[
    str,
    typer.Option(
        metavar="REF", help="smollm2-135m, a directory (config.json + safetensors), a .gguf file, or a hub id."
    ),
]
Method = Annotated[
    str | None, typer.Option(metavar="NAME", help="Decoding method; see `foretell methods`. [default: autoregressive]")
]
DraftModel = Annotated[
    list[str] | None, typer.Option("--draft-model", metavar="REF", help="Draft model; repeatable, several are mixed.")
]
Reference = Annotated[
    list[Path] | None, typer.Option("--reference", metavar="FILE", help="Text that answers may copy from; repeatable.")
]
SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='The method and its options (`foretell methods NAME` lists them), as \'{"method": "ngram"}\'.',
    ),
]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16 or int8.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(metavar="T", help="0: always the most probable token.")]
TopK = Annotated[int, typer.Option(metavar="K", help="Sample among the K most probable tokens; 0: all.")]
TopP = Annotated[float, typer.Option(metavar="P", help="Sample among the fewest tokens that hold this probability.")]
MinP = Annotated[
    float, typer.Option(metavar="P", help="Leave out tokens below this share of the best one's probability.")
]
RepetitionPenalty = Annotated[float, typer.Option(metavar="X", help="Above 1: repeat less of prompt and answer.")]
PresencePenalty = Annotated[
    float, typer.Option(metavar="X", help="Taken once from the score of every token the answer holds.")
]
FrequencyPenalty = Annotated[float, typer.Option(metavar="X", help="Taken for every time the answer holds it.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Equal seeds give equal answers, whoever shares the batch.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="S", help="End before this text; repeatable.")]
System = Annotated[str | None, typer.Option(metavar="S", help="System message.")]
AllowSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--allow-special-tokens", help="Encode special tokens in messages (as <|im_end|>) as such, not as text."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        metavar="MIB",
        min=1,
        help="Most memory for the target's weights; the rest is read from its file in every pass (see method llmcad).",
    ),
]
