"""A draft model with another tokenizer than its target's: the target's with half of the merges."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from foretell.api import Model
from foretell.catalogue.speculators import DRAFT_MODEL
from foretell.lab.reproduce.preparation.maker import Identity, Maker, PreparationSettings
from foretell.lab.reproduce.preparation.texts import Texts
from foretell.load import load
from foretell.model.block.decoder import Decoder
from foretell.model.block.linear import Linear
from foretell.speculator.hf_writer import write_hf
from foretell.speculator.installed import find_installed
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.tokenizer.codec import TextCodec

_SHARE = 0.5
"""Share of the merges that stay."""


class SmallVocabularyDraft(Maker):
    """The installed draft model, or else a trained one, behind a tokenizer with fewer merges. `draft`: makes the draft
    model, None: it is installed; `make`: has it made.
    """

    name = "small_vocabulary"

    def __init__(
        self,
        model: Model,
        texts: Texts,
        settings: PreparationSettings,
        draft: Maker | None,
        make: Callable[[Maker], str],
    ) -> None:
        super().__init__(model, texts, settings)
        self._draft, self._make = draft, make

    @property
    def identity(self) -> Identity:
        """The share of the merges, and the draft model."""
        return {"share": _SHARE, "draft": None if self._draft is None else self._draft.identity}

    def make(self, folder: Path) -> str:
        """Write the draft model with its tokenizer as a Hugging Face directory."""
        self.settings.report("giving the draft model a tokenizer of its own")
        trained, origin = self._network(folder.parent)
        codec, kept = halve_merges(self.model.codec)
        whole = trained.to_decoder(torch.bfloat16)
        rows = torch.tensor(kept)
        head = trained.full_lm_head.detach().to(torch.bfloat16)[rows]
        new = {old: i for i, old in enumerate(kept)}
        config = replace(
            whole.config,
            vocab=len(kept),
            tied=False,
            bos=new.get(whole.config.bos) if whole.config.bos is not None else None,
            eos=tuple(new[t] for t in self.model.eos if t in new),
        )
        small = Decoder(config, whole.embedding[rows], list(whole.blocks), whole.norm, Linear(head))  # type: ignore[arg-type]
        write_hf(folder, small, codec)
        return (
            f"universal_draft: {origin}, with the target's tokenizer cut to the first {_SHARE:.0%} of its merges: "
            f"{len(kept):,} of {self.model.config.vocab:,} tokens and their rows"
        )

    def drafts(self, folder: Path) -> tuple[Model]:
        """The draft model with its tokenizer."""
        return (load(str(folder)),)

    def _network(self, root: Path) -> tuple[DraftNetwork, str]:
        if self._draft is None:
            place = find_installed(DRAFT_MODEL, self.model.checkpoint.fingerprint())
            origin = "the installed draft model"
        else:
            place, origin = root / self._draft.label, self._make(self._draft)
        assert place is not None
        network = self.model.speculator(place)
        assert isinstance(network, DraftNetwork)
        return network, origin


def halve_merges(codec: TextCodec, share: float = _SHARE) -> tuple[TextCodec, list[int]]:
    """A tokenizer with the first merges only, and the tokens that it keeps, by their old numbers, ascending: these are
    its tokens 0, 1, …

    Raises:
        ValueError: its merges are not those of byte-level BPE, or there are none.
    """
    raw = json.loads(codec.tokenizer.to_str())
    model = raw["model"]
    if model.get("type") != "BPE" or not model.get("merges"):
        raise ValueError(
            "a draft model with another tokenizer is made here by leaving out merges, and the target's tokenizer has "
            "none; name one with --draft-model"
        )
    merges: list[Any] = model["merges"]
    stay = merges[: round(len(merges) * share)]
    dropped = {_merged(m) for m in merges[len(stay) :]} - {_merged(m) for m in stay}
    special = {t["content"] for t in raw["added_tokens"]}
    ids: Mapping[str, int] = model["vocab"] | {t["content"]: t["id"] for t in raw["added_tokens"]}
    kept = sorted({i for token, i in ids.items() if token in special or token not in dropped})
    new = {old: i for i, old in enumerate(kept)}
    model["merges"], model["vocab"] = stay, {t: new[i] for t, i in model["vocab"].items() if i in new}
    for token in raw["added_tokens"]:
        token["id"] = new[token["id"]]
    _renumber(raw.get("post_processor"), new)
    return replace(codec, tokenizer=Tokenizer.from_str(json.dumps(raw))), kept


def _merged(merge: str | Collection[str]) -> str:
    """The token of a merge, which files write as a text with a space or as a pair."""
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def _renumber(part: Any, new: Mapping[int, int]) -> None:
    """Give the special tokens of a post-processor their new numbers."""
    if isinstance(part, list):
        for each in part:
            _renumber(each, new)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key == "ids":
                part[key] = [new[i] for i in value]
            else:
                _renumber(value, new)
