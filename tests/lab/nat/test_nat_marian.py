"""Marian checkpoints as autoregressive models: greedy decoding is transformers', and drafts leave it as it is."""

import json
from pathlib import Path

import pytest
import torch

from command import expect_error, run_foretell
from foretell.lab.nat.checkpoint import load_model, require_same_words
from foretell.lab.nat.decode import DecodeOptions, translate
from foretell.lab.nat.lossless import translate_verified
from foretell.lab.nat.marian import MarianModel
from foretell.lab.nat.network import NatConfig, NatModel
from foretell.lab.nat.pairs import END, read_pairs
from foretell.lab.nat.train import NatSettings, config_for

pytestmark = pytest.mark.filterwarnings("ignore:Recommended")
sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")
TEXTS = ("the old man sees a red car", "my friend buys the map today", "a cat", "the child must find the door")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Marian checkpoint, as transformers writes it."""
    folder = tmp_path_factory.mktemp("marian")
    pieces = set[str]()
    for side, texts in (("source", TEXTS), ("target", [t.replace("the", "der") + " oft" for t in TEXTS])):
        (folder / f"{side}.txt").write_text("\n".join(texts))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / f"{side}.txt"), model_prefix=str(folder / side), vocab_size=40, hard_vocab_limit=False,
            minloglevel=2,
        )  # fmt: skip
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        model = sentencepiece.SentencePieceProcessor(str(folder / f"{side}.spm"))
        pieces |= {model.id_to_piece(i) for i in range(3, model.get_piece_size())}
    vocab = {"</s>": 0, "<unk>": 1} | {piece: i for i, piece in enumerate(sorted(pieces), 2)}
    vocab["<pad>"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    torch.manual_seed(1)
    config = transformers.MarianConfig(
        vocab_size=len(vocab), d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
        pad_token_id=vocab["<pad>"], decoder_start_token_id=vocab["<pad>"], eos_token_id=0, forced_eos_token_id=None,
        scale_embedding=True, activation_function="swish", init_std=0.6,
    )  # fmt: skip
    made = transformers.MarianMTModel(config)
    made.final_logits_bias.normal_()
    made.save_pretrained(folder)
    return folder


def test_greedy_decoding_is_that_of_transformers(checkpoint: Path) -> None:
    ours = load_model(checkpoint)
    tokenizer, theirs = (
        kind.from_pretrained(checkpoint) for kind in (transformers.AutoTokenizer, transformers.MarianMTModel)
    )
    translated = translate(ours, [ours.config.source.encode(t) for t in TEXTS], DecodeOptions())
    pad = theirs.config.pad_token_id
    settings = transformers.GenerationConfig(
        num_beams=1, do_sample=False, max_new_tokens=31, bad_words_ids=[[pad]], pad_token_id=pad, eos_token_id=0,
        decoder_start_token_id=pad,
    )  # fmt: skip
    for text, tokens in zip(TEXTS, translated.tokens, strict=True):
        expected = theirs.generate(**tokenizer(text, return_tensors="pt"), generation_config=settings)
        written = tokenizer.decode(expected[0], skip_special_tokens=True)
        assert ours.config.target.decode(tokens) == written and written
    assert isinstance(ours, MarianModel)
    ours._network.final_logits_bias[0, 0] += 100
    ended = translate(ours, [ours.config.source.encode(TEXTS[0])], DecodeOptions())
    assert ended.passes == 1 and ended.tokens == [[]], "its end token ends"


def test_texts_come_back(checkpoint: Path) -> None:
    config = load_model(checkpoint).config
    source = config.source.encode(TEXTS[0])
    assert source[-1] == END and END not in source[:-1]
    assert config.source.decode(source) == TEXTS[0]
    target = config.target.encode("der old man oft")
    assert END not in target and config.target.decode(target) == "der old man oft"
    assert config.source.unknown_words("the ß cat") == ["ß"]


@pytest.mark.parametrize("kind", ["cmlm", "sundae"])
def test_drafts_do_not_change_what_is_decoded(kind: str, checkpoint: Path) -> None:
    verifier = load_model(checkpoint)
    torch.manual_seed(0)
    c = NatConfig(kind=kind, marian=str(checkpoint), hidden=16, heads=2, max_source=32, max_target=31)
    drafter = NatModel(c).eval()
    require_same_words(verifier, drafter, checkpoint)
    for text in TEXTS:
        source = verifier.config.source.encode(text)
        plain = translate(verifier, [source], DecodeOptions())
        drafted = translate_verified(verifier, drafter, source, DecodeOptions())
        assert list(drafted.tokens) == list(plain.tokens[0])


def test_a_checkpoint_teaches_translates_and_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{t}\tder man\n" for t in TEXTS))
    teaches = ("nat", "data", "--from", pairs, "--teacher", checkpoint, "--out", tmp_path / "distilled.tsv")
    assert f"{len(TEXTS)} pairs" in run_foretell(*teaches).stderr
    ours = load_model(checkpoint)
    (tokens,) = translate(ours, [ours.config.source.encode(TEXTS[0])], DecodeOptions()).tokens
    written = ours.config.target.decode(tokens)
    assert run_foretell("nat", "translate", checkpoint, TEXTS[0]).stdout.strip() == written
    assert read_pairs(tmp_path / "distilled.tsv")[0].references == (" ".join(written.split()),)
    report = json.loads(run_foretell("nat", "evaluate", checkpoint, "--data", pairs, "--json").stdout)
    assert report["kind"] == "autoregressive" and report["cpu_milliseconds"] > 0
    settings = NatSettings(kind="cmlm", data=str(pairs), out=str(tmp_path), steps=1, words_of=str(checkpoint))
    assert config_for(settings, read_pairs(pairs)).target.words == ours.config.target.words


def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "marian", "vocab_size": 5}')
    assert "cannot read this Marian checkpoint" in expect_error("nat", "translate", tmp_path, "the cat")
