"""Masked diffusion models: parity with an independent implementation, the caches, the loop, and bad input."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import DREAM, FAST_DLLM, LLADA, SDAR, Reference, load_double, save

from command import expect_error, run_foretell, save_tiny_model, tiny_target
from foretell.lab.diffusion.generate import DiffusionSettings, generate
from foretell.lab.diffusion.reveal import Revealed, choose_to_reveal, choose_tokens, split_evenly
from foretell.model.diffusion.config import read_diffusion

FAMILIES = pytest.mark.parametrize("base", [LLADA, DREAM, SDAR, FAST_DLLM], ids=lambda base: base["model_type"])
PROMPT = (72, 101, 108, 108, 111)


def naive(
    reference: Reference, prompt: tuple[int, ...], length: int, block: int | None, steps: int
) -> tuple[list[int], int]:
    """Reference of the loop at temperature 0: everything is read in every pass; tokens, and passes."""
    x, passes = torch.tensor([*prompt, *[reference.mask] * length]), 0
    own = reference.block
    begin = len(prompt) // own * own if own else len(prompt)
    while begin < len(x):
        last = min(begin // own * own + own, len(x)) if own else len(x)
        end = min(begin + (block or own), last)
        masks = int((x[begin:end] == reference.mask).sum())
        parts = min(steps, masks)
        for step in range(parts):
            count = masks // parts + (step < masks % parts)
            chance = reference.logits(x[:last]).softmax(-1).max(-1)
            score = torch.where(x == reference.mask, 1.0, -1.0)[: len(chance.values)] * chance.values
            score[: max(begin, 0)], score[end:] = -2, -2
            shown = score.topk(count).indices
            x[shown] = chance.indices[shown]
            passes += 1
        begin = end
    return x[len(prompt) :].tolist(), passes


@FAMILIES
def test_a_pass_equals_the_reference(tmp_path: Path, base: Mapping[str, Any]) -> None:
    model = load_double(save(tmp_path, base))
    token = torch.tensor([*PROMPT, *[model.config.mask] * 7])
    p = model.predictor
    found = p.read(p.new_store(len(token)), token, 0, range(1, len(token)))
    torch.testing.assert_close(found, Reference(model, base).logits(token)[1:], rtol=0, atol=1e-5)


@FAMILIES
@pytest.mark.parametrize(("length", "block", "steps"), [(12, 12, 12), (16, 8, 3), (9, 4, 2)])
def test_an_answer_is_that_of_the_naive_loop(
    tmp_path: Path, base: Mapping[str, Any], length: int, block: int, steps: int
) -> None:
    model = load_double(save(tmp_path, base))
    if model.config.block:
        block = min(block, model.config.block)
    settings = DiffusionSettings(max_new_tokens=length, block_length=block, steps=steps)
    answer = generate(model.predictor, PROMPT, settings)
    expected, passes = naive(Reference(model, base), PROMPT, length, block, steps)
    assert list(answer.tokens) == expected and answer.passes == passes


@pytest.mark.parametrize("base", [SDAR, FAST_DLLM], ids=lambda base: base["model_type"])
@pytest.mark.parametrize("block", [None, 1, 2, 3])
def test_a_block_of_block_diffusion_is_revealed_in_parts(tmp_path: Path, base: Mapping[str, Any], block: int) -> None:
    model = load_double(save(tmp_path, base))
    answer = generate(model.predictor, PROMPT, DiffusionSettings(max_new_tokens=14, block_length=block, steps=2))
    assert list(answer.tokens) == naive(Reference(model, base), PROMPT, 14, block, 2)[0]
    with pytest.raises(ValueError, match=r"blocks of 5 tokens were asked for, and .* was trained with blocks of 4"):
        generate(model.predictor, PROMPT, DiffusionSettings(max_new_tokens=14, block_length=5))


@pytest.mark.parametrize(("base", "mask"), [(SDAR, 151669), (FAST_DLLM, 151665)])
def test_a_checkpoint_that_states_neither_mask_token_nor_block_length(base: Mapping[str, Any], mask: int) -> None:
    raw = {key: value for key, value in base.items() if key not in ("block_size", "bd_size")} | {"vocab_size": 151936}
    found = read_diffusion(raw)
    assert (found.mask, found.block) == (mask, 4 if base is SDAR else 32)
    with pytest.raises(ValueError, match=f"config.json: mask token {mask} is outside the vocabulary"):
        read_diffusion(raw | {"vocab_size": 260})


def test_block_diffusion_keeps_finished_blocks_without_loss(tmp_path: Path) -> None:
    model = load_double(save(tmp_path, SDAR))
    answer = generate(model.predictor, PROMPT, DiffusionSettings(max_new_tokens=15))
    # Prompt and first block once; then the block before, which has changed, and single blocks.
    assert answer.passes == 15 and answer.positions < 15 * 8 + 5
    whole = load_double(tmp_path)
    everything = whole.predictor.read
    whole.predictor.read = lambda store, token, begin, positions, end=None: everything(  # type: ignore[method-assign]
        store, _sequence(store, token, begin), 0, positions, end
    )
    assert generate(whole.predictor, PROMPT, DiffusionSettings(max_new_tokens=15)).tokens == answer.tokens


def _sequence(store: Any, token: torch.Tensor, begin: int) -> torch.Tensor:
    """The whole sequence so far, from the windows that were read."""
    known = getattr(store, "seen", torch.zeros(0, dtype=torch.long))
    store.seen = torch.cat((known[:begin], token))
    return store.seen  # type: ignore[no-any-return]


@pytest.mark.parametrize("base", [LLADA, DREAM], ids=lambda base: base["model_type"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_window_is_the_whole_pass_while_nothing_outside_it_has_changed(
    tmp_path: Path, base: Mapping[str, Any], cache: str
) -> None:
    model = load_double(save(tmp_path, base))
    # Two passes per block: the second one reads the window; with one layer's worth of difference only in the block.
    plain, kept = (
        generate(model.predictor, PROMPT, DiffusionSettings(max_new_tokens=16, block_length=8, steps=1, cache=name))
        for name in ("none", cache)
    )
    assert plain.tokens == kept.tokens and plain.positions == kept.positions
    shifted = int(model.config.shifted)
    run = generate(model.predictor, PROMPT, DiffusionSettings(max_new_tokens=16, block_length=8, steps=4, cache=cache))
    first, second = (8, 8) if cache == "dual" else (16, 8)
    assert run.positions == 2 * 21 + 3 * (first + second + 2 * shifted) and run.passes == 8


def test_the_window_reads_what_the_store_has(tmp_path: Path) -> None:
    model = load_double(save(tmp_path, LLADA))
    p, mask = model.predictor, model.config.mask
    token = torch.tensor([*PROMPT, *[mask] * 6])
    store = p.new_store(len(token))
    whole = p.read(store, token, 0, range(5, 11))
    # Nothing has changed since the pass over everything, so any window gives the same logits.
    for begin, last in ((5, 11), (4, 9), (8, 11)):
        window = p.read(store, token[begin:last], begin, range(max(begin, 5), last), end=11)
        torch.testing.assert_close(window, whole[max(begin, 5) - 5 : last - 5], rtol=0, atol=1e-9)
    changed = token.clone()
    changed[10] = 65
    assert (p.read(p.new_store(11), changed, 0, [5]) - whole[:1]).abs()[:, :mask].max() > 1e-6, "it is not causal"


def test_thresholds_reveal_one_token_or_all(tmp_path: Path) -> None:
    model = load_double(save(tmp_path, DREAM))

    def passes(threshold: float) -> int:
        return generate(
            model.predictor, PROMPT, DiffusionSettings(max_new_tokens=12, block_length=6, threshold=threshold)
        ).passes

    assert passes(1.0) == 12 and passes(0.0) == 2 and 2 <= passes(0.3) <= 12


def test_which_predictions_are_revealed() -> None:
    found = Revealed(torch.arange(5), torch.tensor([0.2, 0.9, 0.5, 0.95, 0.1]))
    assert choose_to_reveal(found, 2, None).tolist() == [False, True, False, True, False]
    assert choose_to_reveal(found, 1, 0.5).tolist() == [False, True, True, True, False]
    assert choose_to_reveal(found, 1, 0.99).tolist() == [False, False, False, True, False]
    assert split_evenly(10, 4) == [3, 3, 2, 2]


def test_draws_have_the_distribution_of_the_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    for temperature in (0.5, 1.0, 2.0):
        generator = torch.Generator().manual_seed(0)
        found = choose_tokens(logits.expand(20_000, 4), temperature, "low_confidence", generator)
        shares = torch.bincount(found.token, minlength=4) / 20_000
        torch.testing.assert_close(shares, (logits / temperature).softmax(-1), rtol=0, atol=0.015)
        torch.testing.assert_close(found.confidence.float(), logits.softmax(-1)[found.token])
    greedy = choose_tokens(logits[None], 0.0, "random", torch.Generator())
    assert greedy.token.tolist() == [3]


def test_an_answer_ends_at_its_first_end_token(tmp_path: Path) -> None:
    model = load_double(save(tmp_path, LLADA))
    whole = generate(model.predictor, PROMPT, DiffusionSettings(max_new_tokens=16, block_length=4))
    end = whole.tokens[5]
    cut = generate(model.predictor, PROMPT, DiffusionSettings(max_new_tokens=16, block_length=4), (end,))
    assert cut.ended and cut.tokens == whole.tokens[: whole.tokens.index(end)] and cut.passes <= 8
    assert not whole.ended and model.config.mask not in whole.tokens


def test_commands(tmp_path: Path) -> None:
    folder = save(tmp_path / "dream", DREAM)
    command = (
        "diffusion",
        "generate",
        "Hi",
        "--model",
        folder,
        "--max-new-tokens",
        "8",
        "--block-length",
        "4",
        "--json",
    )
    found = json.loads(run_foretell(*command).stdout)
    assert len(found["tokens"]) <= 8 and found["prompt_tokens"] == 2
    sampled = (*command, "--temperature", "1", "--seed", "3", "--cache", "dual")
    first, second = (json.loads(run_foretell(*sampled).stdout)["text"] for _ in range(2))
    assert first == second != found["text"]


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    dream = save(tmp_path / "dream", DREAM)
    text = expect_error("generate", "Hi", "--model", dream)
    assert "an autoregressive model was asked for, and this is a masked diffusion model (Dream)" in text
    text = expect_error("diffusion", "generate", "Hi", "--model", tiny_target())
    assert "a masked diffusion model was asked for" in text and "found model_type 'llama'" in text
    embedded = expect_error("diffusion", "generate", "Hi", "--model", "smollm2-135m")
    assert "smollm2-135m: a masked diffusion model was asked for" in embedded and "foretell generate" in embedded
    outside = save(tmp_path / "outside", LLADA, mask_token_id=260)
    text = expect_error("diffusion", "generate", "Hi", "--model", outside)
    assert "mask token 260 is outside the vocabulary, which has 260 tokens" in text
    old = save(tmp_path / "old", LLADA, layer_norm_type="default")
    assert "layer_norm_type" in expect_error("diffusion", "generate", "Hi", "--model", old)
    assert "threshold: input should be less than or equal to 1" in expect_error(
        "diffusion", "generate", "Hi", "--model", dream, "--threshold", "2"
    )
    text = expect_error("diffusion", "generate", "Hi", "--model", dream, "--max-new-tokens", "500")
    assert "exceed this model's context of 96" in text
    text = expect_error("diffusion", "generate", "Hi", "--model", dream, "--cache", "all")
    assert "'none', 'prefix' or 'dual', found 'all'" in text
    text = expect_error("diffusion", "generate", "", "--model", dream)
    assert "a prompt of at least one token" in text


def test_a_published_model_drafts_for_its_sibling(tmp_path: Path) -> None:
    sibling = save_tiny_model(tmp_path / "sibling", vocab=260)
    command = ("generate", "Hi", "--model", sibling, "--max-new-tokens", "24", "--ignore-eos", "--dtype", "float32")
    plain = run_foretell(*command, "--method", "autoregressive").stdout
    for base in (LLADA, DREAM, SDAR, FAST_DLLM):
        drafter = save(tmp_path / base["model_type"], base)
        drafted = run_foretell(*command, "--method", "masked_diffusion", "--draft-model", drafter)
        assert drafted.exit_code == 0 and drafted.stdout == plain
    text = expect_error(*command, "--method", "draft_model", "--draft-model", drafter)
    assert "drafts with draft models, and a speculator of another kind was named" in text
    other = save_tiny_model(tmp_path / "other", vocab=261)
    text = expect_error(*command[:3], other, "--method", "masked_diffusion", "--draft-model", drafter)
    assert "trained for another model" in text
    text = expect_error(*command, "--method", "masked_diffusion", "--draft-model", other)
    assert "a speculator of kind masked_diffusion, and a language model was named with --draft-model" in text
