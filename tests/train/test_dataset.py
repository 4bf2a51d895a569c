"""Data sets: their generation, and that an interruption loses no finished document."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from command import expect_error, run_foretell, tiny_target
from foretell.api import Model
from foretell.cli import progress
from foretell.core.sampling import SamplingParams
from foretell.model.block.decoder import Decoder
from foretell.testing import TINY, letter_codec, tiny_decoder
from foretell.train.data import dataset
from foretell.train.data.dataset import Dataset, DatasetManifest, DatasetWriter, DocumentRecord
from foretell.train.data.features import compute_hidden_states
from foretell.train.data.generate import PromptSource, generate_answers, write_text_chunks
from foretell.train.data.hidden_state_cache import HiddenStateCache
from foretell.utils.store import RECORDS_FILE, SETTINGS_FILE

LETTERS = replace(TINY, vocab=26, hidden=16)
ENDS = tuple(range(23, 26))
"""Several letters end a turn, because a random model would rarely write a single one."""
MANIFEST = DatasetManifest(
    model="tiny",
    fingerprint="f",
    tokenizer="t",
    vocab=26,
    kind="self",
    greedy_share=0.5,
    max_question=40,
    max_answer=12,
)


@pytest.fixture(scope="module")
def model() -> Model:
    codec = replace(
        letter_codec(26), chat_template="a{{ messages[0].content }}z{% if add_generation_prompt %}y{% endif %}"
    )
    return Model("tiny", LETTERS, codec, tiny_decoder(LETTERS, sharpness=0.2), "float64", eos=ENDS)


def fill(
    model: Model, folder: Path, tokens: int, steps: int | None = None, hidden_layers: tuple[int, ...] = ()
) -> None:
    with DatasetWriter(folder, MANIFEST) as collection:
        prompts = PromptSource(model, MANIFEST, None)
        cache = (
            cache_of(folder, hidden_layers, lengths(folder) if collection.num_learned_tokens else [])
            if hidden_layers
            else None
        )
        for _ in islice(
            generate_answers(model, prompts, MANIFEST, collection, rows=4, num_tokens=tokens, cache=cache), steps
        ):
            pass


def lengths(folder: Path) -> list[int]:
    return [len(d.tokens) for d in Dataset.open(folder)]


def cache_of(folder: Path, hidden_layers: tuple[int, ...], sizes: list[int]) -> HiddenStateCache:
    return HiddenStateCache(folder / "features", "f", hidden_layers, sizes, LETTERS.hidden, None)


def texts(folder: Path) -> set[tuple[int, ...]]:
    return {tuple(d.tokens.tolist()) for d in Dataset.open(folder)}


def test_greedy_answers_are_the_models_own(model: Model, tmp_path: Path) -> None:
    fill(model, tmp_path / "set", 50)
    data = Dataset.open(tmp_path / "set")
    assert data.num_learned_tokens >= 50
    greedy = [d for d in data if d.greedy]
    assert greedy and len(greedy) < len(data)
    for document in greedy[:5]:
        prompt = document.tokens[: document.start].tolist()
        engine = model.engine()
        engine.submit(model.request("a", SamplingParams(), max_new_tokens=1))
        request = replace(model.request("a", max_new_tokens=12), prompt=prompt)
        number = engine.submit(request)
        said = [t for u in engine.run() if u.request == number for t in u.tokens]
        assert document.tokens[document.start :].tolist() == said


def test_prompts_are_whole_turns_of_the_template(model: Model, tmp_path: Path) -> None:
    fill(model, tmp_path / "set", 50)
    for document in Dataset.open(tmp_path / "set"):
        prompt = model.codec.decode(document.tokens[: document.start].tolist())
        assert prompt.startswith("a") and prompt.endswith("zy") and not set(prompt[-6:-2]) & set("xyz")


def test_an_interrupted_set_goes_on_to_the_same_texts(model: Model, tmp_path: Path) -> None:
    fill(model, tmp_path / "whole", 50)
    fill(model, tmp_path / "broken", 50, steps=60)
    before = texts(tmp_path / "broken")
    lines = tmp_path / "broken" / RECORDS_FILE
    with lines.open("a") as file:
        file.write('{"number": 99, "tok')
    fill(model, tmp_path / "broken", 50)
    after = texts(tmp_path / "broken")
    assert before and before <= after
    common = texts(tmp_path / "whole") & after
    assert len(common) >= 0.7 * min(len(after), len(texts(tmp_path / "whole")))


def test_states_are_kept_while_answers_are_written(model: Model, tmp_path: Path) -> None:
    """Recorded states are those that training would compute, also after an interruption; others are not in the
    cache.
    """
    hidden_layers, folder = (1, 3), tmp_path / "set"
    fill(model, folder, 90, steps=40, hidden_layers=hidden_layers)
    fill(model, folder, 60)  # without them
    fill(model, folder, 90, hidden_layers=hidden_layers)
    data, cache = Dataset.open(folder), cache_of(folder, hidden_layers, lengths(folder))
    there = [i for i, d in enumerate(data) if cache.contains(i, d.tokens)]
    assert 0 in there and len(data) - 1 in there and len(there) < len(data)
    assert isinstance(model.network, Decoder)
    for i in there:
        tokens = data[i].tokens
        expected = compute_hidden_states(model.network, torch.from_numpy(tokens.astype(np.int64))[None], hidden_layers)
        for ours, theirs in zip(cache.load(i, 0, len(tokens) - 1), expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs[0, :-1], atol=0.03, rtol=0.03)


def test_shards_hold_what_the_journal_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "DOCUMENTS_PER_SHARD", 3)
    records = [DocumentRecord(number=n, tokens=list(range(n + 2)), start=1, greedy=n % 2 == 0) for n in range(7)]
    with DatasetWriter(tmp_path, MANIFEST) as collection:
        for record in [*records, DocumentRecord(number=50, tokens=[], start=0)]:
            collection.add(record)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    data = Dataset.open(tmp_path)
    assert [d.tokens.tolist() for d in data] == [r.tokens for r in records]
    assert [(d.start, d.greedy) for d in data] == [(1, r.greedy) for r in records]
    with DatasetWriter(tmp_path, MANIFEST) as again:
        assert again.known_numbers == {*range(7), 50} and again.num_learned_tokens == data.num_learned_tokens
    modes = {file.stat().st_mode for file in tmp_path.rglob("*.*") if file.is_file()}
    assert len(modes) == 1, "readable by whom the umask lets read"


def test_a_kill_between_shard_and_journal_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "DOCUMENTS_PER_SHARD", 2)
    with DatasetWriter(tmp_path, MANIFEST) as collection:
        collection.add(DocumentRecord(number=0, tokens=[1, 2], start=1))
        journal = (tmp_path / RECORDS_FILE).read_text()
        collection.add(DocumentRecord(number=1, tokens=[3, 4], start=1))
    (tmp_path / RECORDS_FILE).write_text(journal)
    assert len(Dataset.open(tmp_path)) == 2
    with DatasetWriter(tmp_path, MANIFEST) as again:
        assert again.num_learned_tokens == 2
    assert len(Dataset.open(tmp_path)) == 2


def test_held_out_texts_stay_held_out_when_the_set_grows(tmp_path: Path) -> None:
    def data(count: int) -> Dataset:
        documents = [dataset.Document(np.array([n, n + 1, n * n], np.int32), 1) for n in range(count)]
        return Dataset(tmp_path, MANIFEST, documents)

    small, large = data(40), data(80)
    train, held = small.split(8)
    assert sorted(train + held) == list(range(40)) and len(held) == 8
    grown = {tuple(large[i].tokens) for i in large.split(16)[1]}
    # Of the fewest hashes among twice as many texts, about half were among the fewest before.
    assert len(grown & {tuple(small[i].tokens) for i in held}) >= 4
    with pytest.raises(ValueError, match="too few"):
        data(10).split(8)


def test_plain_text_is_cut_into_pieces(model: Model, tmp_path: Path) -> None:
    manifest = MANIFEST.model_copy(update={"kind": "text"})
    with DatasetWriter(tmp_path, manifest) as collection:
        for _ in write_text_chunks(model, iter(["abcdefgh", "xyz"]), collection, length=5, num_tokens=100):
            pass
        collection.seal()
    found = [model.codec.decode(d.tokens.tolist()) for d in Dataset.open(tmp_path)]
    assert found == ["abcde", "fgh", "xyz"] and all(d.start == 0 for d in Dataset.open(tmp_path))


def test_bad_requests_are_refused_in_a_sentence(tmp_path: Path) -> None:
    out = tmp_path / "x"
    assert "--self" in expect_error("data", "generate", "--tokens", "10", "--out", out)
    assert "foretell data generate" in expect_error("data", "show", tmp_path)
    (tmp_path / "p.jsonl").write_text(json.dumps({"promt": "hello"}) + "\n")
    prompts = ("--prompts", tmp_path / "p.jsonl", "--model", tiny_target())
    assert "did you mean" in expect_error("data", "generate", *prompts, "--tokens", "10", "--out", out)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    for states in ("2,x", "99"):
        said = expect_error("data", "generate", *prompts, "--tokens", "10", "--out", out, "--states", states)
        assert f"--states={states}" in said
    if not torch.cuda.is_available():
        asked = (*prompts, "--tokens", "10", "--out", out, "--device", "cuda")
        assert "finds no CUDA GPU here" in expect_error("data", "generate", *asked)
    plain = ("--text", tmp_path / "p.jsonl", "--model", tiny_target(), "--states", "1")
    assert "--states would have no effect: the model does not" in expect_error(
        "data", "generate", *plain, "--tokens", "10", "--out", out
    )


def test_a_log_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_INTERVAL", 0.0)
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text("some plain text to learn")
    wanted = ("--tokens", "100", "--max-answer", "20", "--out", tmp_path / "set")
    result = run_foretell("data", "generate", "--text", tmp_path / "text", "--model", tiny_target(), *wanted)
    lines = [line for line in result.stderr.splitlines() if "of 100 tokens" in line]
    assert len(lines) > 3 and lines[-1].startswith("100 of 100 tokens") and lines[-1].endswith("tokens/s")


def test_a_model_that_asks_nothing_is_told_so(model: Model, tmp_path: Path) -> None:
    endless = Model("tiny", LETTERS, model.codec, model.network, "float64", eos=())
    with pytest.raises(ValueError, match="no usable question"), DatasetWriter(tmp_path, MANIFEST) as collection:
        for _ in generate_answers(
            endless, PromptSource(endless, MANIFEST, None), MANIFEST, collection, rows=16, num_tokens=50
        ):
            pass


def test_a_model_without_a_chat_template_answers_given_texts_only(model: Model) -> None:
    base = Model("base", LETTERS, replace(model.codec, chat_template=None), model.network, "float64", eos=ENDS)
    with pytest.raises(ValueError, match=r"base has no chat template, so it writes no prompts: .*--prompts FILE"):
        PromptSource(base, MANIFEST, None)
    assert PromptSource(base, MANIFEST, [base.tokens("abc")]).given_prompt(0) == base.codec.encode("abc")


def test_another_setting_does_not_mix_into_a_set(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, MANIFEST) as collection:
        collection.add(DocumentRecord(number=0, tokens=[1, 2], start=1))
    with pytest.raises(ValueError, match="another seed"):
        DatasetWriter(tmp_path, MANIFEST.model_copy(update={"seed": 3}))


def small_set(folder: Path) -> Path:
    """Two texts in a shard, another in the journal."""
    with DatasetWriter(folder, MANIFEST) as collection:
        for number in range(2):
            collection.add(DocumentRecord(number=number, tokens=[1, 2, 3], start=1))
        collection.seal()
        collection.add(DocumentRecord(number=2, tokens=[4, 5], start=1))
    return folder


SHARD_DAMAGES: dict[str, dict[str, np.ndarray | None]] = {
    "'start' is missing": {"start": None},
    "'end' is missing or not a list of integers": {"end": np.array([3.0, 6.0])},
    "'tokens' is missing or not a list": {"tokens": np.zeros((2, 3), np.int32)},
    "differ in length": {"number": np.array([0])},
    "do not add up to its tokens": {"end": np.array([3, 7])},
    "start is out of range": {"start": np.array([1, 4])},
    "a token or a": {"tokens": np.array([1, 2, -3, 1, 2, 3], np.int32)},
    "holds token 26, and its model has 26": {"tokens": np.array([1, 2, 26, 1, 2, 3], np.int32)},
}


@pytest.mark.parametrize("words", SHARD_DAMAGES)
def test_a_damaged_shard_is_refused_in_a_sentence(words: str, tmp_path: Path) -> None:
    shard = small_set(tmp_path) / "00000.safetensors"
    arrays = {name: a for name, a in (load_file(shard) | SHARD_DAMAGES[words]).items() if a is not None}
    save_file(arrays, shard)
    with pytest.raises(ValueError, match=words):
        Dataset.open(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"number": 3, "tokens": [1, 99999999999999999999], "start": 1}',
        '{"number": 3, "tokens": [1, -2], "start": 1}',
        '{"number": 3, "tokens": [1, 2], "start": 3}',
        "[" * 100_000,
    ],
)
def test_a_damaged_line_of_the_journal_is_refused_in_a_sentence(line: str, tmp_path: Path) -> None:
    with (small_set(tmp_path) / RECORDS_FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"records.jsonl, line 2: a damaged record"):
        Dataset.open(tmp_path)


def test_settings_nested_without_end_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (small_set(tmp_path) / SETTINGS_FILE).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"settings.json: not valid JSON"):
        Dataset.open(tmp_path)


def test_a_new_shard_replaces_none_when_an_earlier_one_was_deleted(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, MANIFEST) as collection:
        for number in range(2):
            collection.add(DocumentRecord(number=number, tokens=[number + 1, 9], start=1))
            collection.seal()
    (tmp_path / "00000.safetensors").unlink()
    with DatasetWriter(tmp_path, MANIFEST) as collection:
        collection.add(DocumentRecord(number=0, tokens=[1, 9], start=1))
        collection.seal()
    assert sorted(d.tokens.tolist() for d in Dataset.open(tmp_path)) == [[1, 9], [2, 9]]
