"""Answers of a model to many prompts, thousands at a time, as a data set of `foretell data generate`: for a GPU, which
the batches of `data generate` leave idle while the host keeps its books.

Greedy answers, and answers at a temperature; second turns go on from the answers. The set ends with the prompts or with
the time, and what is written then is cut there.

.venv/bin/python tools/answers.py PROMPTS.jsonl... --out DIR --model smollm2-135m --device cuda --minutes 2
"""

import json
import os
import random
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer

from foretell.load import load, load_codec
from foretell.model.block.attention import AttentionBackend
from foretell.model.block.decoder import Decoder
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.model.training.chunked_attention import causal_attention
from foretell.model.training.full_forward import forward_blocks
from foretell.tokenizer.codec import Message, TextCodec
from foretell.train.data.dataset import DatasetManifest, DatasetWriter, DocumentRecord
from foretell.train.recipe.base import plain_decoder

GROUP = 16384
"""Prompts that are sorted by length, so that those of a batch are about as long."""
CHECKED = 16
"""Steps between two looks at which rows are done."""
KEPT = 0.8
"""Rows that are done are taken out when no more than this share is left."""
READ = 65536
"""Tokens of prompts that are read at a time."""
WIDTH = 32
"""Lengths of prompts and of what is attended to are rounded up to a multiple of this."""
PART = 512
"""Conversations that a process encodes at a time."""
Question = tuple[list[Message], list[int], str]
"""A conversation, its last answer, and what is asked next; the latter may be empty."""
Encoded = tuple[list[Message], list[int]]
"""A conversation and its tokens."""
FOLLOWED = 330
"""Longest prompt and answer, in tokens, that a second turn goes on from."""


class Rows(AttentionBackend):
    """Keys and values of the rows of a batch, each of which has read its own number of tokens.

    `attend` reads prompts, `[n, s]` tokens of the rows `first ..`, or one token of every row, `[r, 1]`.
    """

    def __init__(self, decoder: Decoder, count: int, slots: int) -> None:
        c, device = decoder.config, decoder.device
        shape = count, c.kv_heads, slots, c.head_dim
        self._k, self._v = (
            [torch.zeros(shape, dtype=decoder.embedding.dtype, device=device) for _ in range(c.layers)]
            for _ in range(2)
        )
        self._scale, self._groups, self.first = c.scale, c.kv_heads, 0
        self.place = torch.zeros(count, dtype=torch.int64, device=device)
        """Where every row's next token stands."""

    def look_back(self, seen: int) -> None:
        """Before a step: attend to so many slots at most."""
        self._seen = min(-(-seen // WIDTH) * WIDTH, self._k[0].shape[2])
        later = torch.arange(self._seen, device=self.place.device) > self.place[:, None]
        self._bias = torch.zeros(later.shape, dtype=self._k[0].dtype, device=later.device)
        self._bias = self._bias.masked_fill(later, float("-inf"))[:, None, None]
        self._row = torch.arange(len(self.place), device=self.place.device)

    def keep(self, row: torch.Tensor) -> None:
        """Keep these rows."""
        self.place = self.place[row]
        for store in (self._k, self._v):
            for layer, part in enumerate(store):
                store[layer] = part[row]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the new tokens, whose keys and values are kept."""
        keys, values = self._k[layer], self._v[layer]
        if q.shape[1] > 1:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            rows = slice(self.first, self.first + len(q))
            keys[rows, :, : k.shape[2]], values[rows, :, : k.shape[2]] = k, v
            return causal_attention(q, k, v, self._scale, extra=extra).transpose(1, 2).flatten(2)
        for store, new in ((keys, k), (values, v)):
            store[self._row, :, self.place] = new[:, 0].to(store.dtype)
        grouped = q.to(keys.dtype).view(len(q), self._groups, -1, q.shape[-1]) * self._scale
        score = grouped @ keys[:, :, : self._seen].transpose(-1, -2) + self._bias
        weight = score.softmax(-1, dtype=torch.float32).to(values.dtype)
        return (weight @ values[:, :, : self._seen]).reshape(len(q), 1, -1)


@dataclass
class Asked:
    """A prompt and what was answered so far."""

    number: int
    messages: list[Message]
    prompt: list[int]
    greedy: bool
    answer: list[int] = field(default_factory=list)

    @property
    def record(self) -> DocumentRecord:
        """The document of the set."""
        tokens, start = self.prompt + self.answer, len(self.prompt)
        return DocumentRecord(number=self.number, tokens=tokens, start=start, greedy=self.greedy)


class Writer:
    """Answers batches of prompts."""

    def __init__(self, decoder: Decoder, eos: Sequence[int], temperature: float, longest: int, ends: float) -> None:
        self._decoder, self._temperature, self._longest, self._ends = decoder, temperature, longest, ends
        self._eos = torch.tensor(eos, device=decoder.device)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._ends

    @torch.inference_mode()
    def answer(self, batch: Sequence[Asked]) -> None:
        """Answer all prompts of a batch."""
        device, lengths = self._decoder.device, [len(a.prompt) for a in batch]
        width = -(-max(lengths) // WIDTH) * WIDTH
        rows = Rows(self._decoder, len(batch), width + self._longest)
        rows.place += torch.tensor(lengths, device=device)
        sampled = torch.tensor([not a.greedy for a in batch], device=device)
        left, out = list(batch), list[torch.Tensor]()
        out.append(self._choose(self._read(rows, batch, width), sampled))
        ended = torch.isin(out[-1], self._eos)
        for step in range(1, self._longest):
            rows.look_back(width + step)
            out.append(self._choose(self._forward(out[-1][:, None], rows.place[:, None], rows)[:, 0], sampled))
            ended = ended | torch.isin(out[-1], self._eos)
            rows.place += 1
            if step % CHECKED == 0:
                going = (~ended).nonzero()[:, 0]
                if self.late or not len(going):
                    break
                if len(going) <= KEPT * len(left):
                    self._hand_over(left, out)
                    # The last token is read next.
                    left, out = [left[i] for i in going.tolist()], [out[-1][going]]
                    rows.keep(going)
                    sampled, ended = sampled[going], ended[going]
        self._hand_over(left, out)

    def _hand_over(self, asked: Sequence[Asked], out: Sequence[torch.Tensor]) -> None:
        """Add tokens to the answers, each up to its end; an answer that is begun has the first of them."""
        eos = set(self._eos.tolist())
        for one, tokens in zip(asked, torch.stack(tuple(out), 1).tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
            one.answer += tokens[bool(one.answer) : end]

    def _read(self, rows: Rows, batch: Sequence[Asked], width: int) -> torch.Tensor:
        """Read the prompts; returns the last states."""
        states, count = list[torch.Tensor](), max(READ // width, 1)
        for first in range(0, len(batch), count):
            rows.first, part = first, batch[first : first + count]
            token = torch.zeros(len(part), width, dtype=torch.int64)
            for i, asked in enumerate(part):
                token[i, : len(asked.prompt)] = torch.tensor(asked.prompt)
            x = self._forward(token.to(self._decoder.device), None, rows)
            last = rows.place[first : first + len(part)] - 1
            states.append(x[torch.arange(len(part), device=x.device), last])
        return torch.cat(states)

    def _forward(self, token: torch.Tensor, position: torch.Tensor | None, rows: Rows) -> torch.Tensor:
        """The output of the last block."""
        d = self._decoder
        x = d.embed(token.reshape(-1)).view(*token.shape, -1)
        ropes = d.rope_tables, d.local_rope_tables
        return forward_blocks(d.blocks, d.config, ropes, x, attention=rows, position=position)

    def _choose(self, state: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """The next tokens: the likeliest, or drawn by the Gumbel-max trick."""
        logits = self._decoder.logits(self._decoder.final_norm(state))
        noise = torch.empty_like(logits).exponential_().log_().mul_(self._temperature)
        return (logits - noise.masked_fill_(~sampled[:, None], 0)).argmax(-1)


@cache
def codec_of(model: str) -> TextCodec:
    """The tokenizer, once per process."""
    return load_codec(model)


def encode(model: str, texts: Sequence[Question]) -> list[Encoded]:
    """Conversations and their tokens; an answer and what is asked next are put after one that has them."""
    codec, made = codec_of(model), []
    for messages, answer, follow in texts:
        if follow:
            said = codec.decode(answer).strip()
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": follow}]
        made.append((messages, codec.chat(messages)))
    return made


def batches(group: Sequence[Asked], longest: int, slots: int, most: int) -> Iterator[list[Asked]]:
    """Prompts of about the same length, as many as the slots of the cache allow."""
    ordered = sorted(group, key=lambda a: -len(a.prompt))
    while ordered:
        count = min(max(slots // (len(ordered[0].prompt) + WIDTH + longest), 1), most)
        yield ordered[:count]
        ordered = ordered[count:]


def second_turns(
    done: Sequence[Asked], eos: Sequence[int], draw: random.Random, forms: Sequence[str], share: float
) -> list[Question]:
    """What is asked next after some of the first, greedy, whole and short answers; `share`: of all answers."""
    on = [
        (a.messages, a.answer[:-1], draw.choice(forms))
        for a in done
        if len(a.messages) == 1 and a.greedy and a.answer[-1] in eos and len(a.prompt) + len(a.answer) < FOLLOWED
    ]
    return draw.sample(on, min(len(on), int(share * len(done))))


def main(
    prompts: list[Path],
    out: Annotated[Path, typer.Option(help="Folder of the data set.")],
    model: str = DEFAULT_MODEL,
    device: str = "cuda",
    dtype: str = "bfloat16",
    minutes: Annotated[float, typer.Option(help="Time for the answers.")] = 10.0,
    tokens: Annotated[int, typer.Option(help="Tokens of answers after which it ends.")] = 1 << 40,
    greedy_share: float = 0.8,
    temperature: Annotated[float, typer.Option(help="Of the other answers.")] = 1.0,
    max_answer: int = 320,
    max_prompt: int = 960,
    slots: Annotated[int, typer.Option(help="Tokens that the cache holds.")] = 1_500_000,
    rows: Annotated[int, typer.Option(help="Most prompts of a batch.")] = 4096,
    group: Annotated[int, typer.Option(help="Prompts that are sorted by length.")] = GROUP,
    follow_share: Annotated[float, typer.Option(help="Second turns, as a share of the answers.")] = 0.12,
    seed: int = 0,
    workers: int = 8,
) -> None:
    """Write the set."""
    draw = random.Random(seed)
    forms = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text())["follow"]
    lines = dict.fromkeys(line for path in prompts for line in path.read_text().splitlines())
    given = [(json.loads(line)["messages"], list[int](), "") for line in lines]
    draw.shuffle(given)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:

        def submit(questions: Sequence[Question]) -> list[Future[list[Encoded]]]:
            return [pool.submit(encode, model, questions[i : i + PART]) for i in range(0, len(questions), PART)]

        waiting = submit(given)
        target = load(model, dtype, device)
        torch.manual_seed(seed)
        decoder = plain_decoder(target.network, getattr(torch, dtype)) or target.checkpoint.decoder(
            getattr(torch, dtype)
        )
        manifest = DatasetManifest.of(
            target, "prompts", seed=seed, precision=dtype, greedy_share=greedy_share, temperature=temperature,
            max_answer=max_answer, sources=tuple(path.name for path in prompts),
        )  # fmt: skip
        started = time.monotonic()
        writer = Writer(decoder, target.eos, temperature, max_answer, started + 60 * minutes)
        number, follow = 0, list[Future[list[Encoded]]]()
        with DatasetWriter(out, manifest) as dataset:
            while waiting and not writer.late and dataset.num_learned_tokens < tokens:
                count = -(-group // PART)
                ready, waiting = [*waiting[:count], *follow], waiting[count:]
                asked = [
                    Asked(number + i, messages, prompt, draw.random() < greedy_share)
                    for i, (messages, prompt) in enumerate(pair for each in ready for pair in each.result())
                    if len(prompt) <= max_prompt
                ]
                number += sum(len(each.result()) for each in ready)
                done = list[Asked]()
                parts = list(batches(asked, max_answer, slots, rows))
                draw.shuffle(parts)
                for part in parts:
                    if writer.late or dataset.num_learned_tokens >= tokens:
                        break
                    writer.answer(part)
                    dataset.add_shard([a.record for a in part])
                    done += part
                    seconds = time.monotonic() - started
                    print(
                        f"{seconds:.1f} s: {len(part)} prompts of up to {len(part[0].prompt)} tokens, "
                        f"{dataset.num_learned_tokens:,} tokens, {dataset.num_learned_tokens / seconds:,.0f} a second",
                        flush=True,
                    )
                follow = submit(second_turns(done, target.eos, draw, forms, follow_share))
        pool.shutdown(cancel_futures=True)
    typer.echo(f"{out}: {dataset.num_learned_tokens:,} tokens to learn")


if __name__ == "__main__":
    typer.run(main)
