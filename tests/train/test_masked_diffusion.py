"""Adapting a target to masked diffusion: masks, annealed attention, the bound, and what is written."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from training_helpers import losses, settings, shared, target, task, trainer

from command import expect_error, run_foretell, tiny_target
from foretell.lab.diffusion.evaluate import evaluate
from foretell.lab.diffusion.load import load_diffusion
from foretell.model.training.full_forward import full_forward
from foretell.speculator.checkpoint import load_own
from foretell.speculator.network.masked_diffusion import MaskedDiffusion
from foretell.train.data.batch import Batch
from foretell.train.objective.masking import annealed_attention, bound_weights, draw_masks
from foretell.train.recipe.masked_diffusion import MaskedDiffusionRecipe

OPTIONS = {"mask_token": "255"}


def test_masks_are_learned_tokens_in_uniform_numbers() -> None:
    learned = torch.zeros(6000, 9, dtype=torch.bool)
    learned[:, 3:8] = True
    learned[0] = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        masked = draw_masks(learned)
    assert not (masked & ~learned).any() and (masked[1:].sum(1) >= 1).all() and not masked[0].any()
    counts = torch.bincount(masked[1:].sum(1), minlength=6)[1:] / 5999
    torch.testing.assert_close(counts, torch.full((5,), 0.2), rtol=0, atol=0.03)
    weights = bound_weights(learned, masked)
    torch.testing.assert_close(weights.sum(1)[1:], torch.full((5999,), 5.0))


def test_attention_goes_from_causal_to_full() -> None:
    visible = torch.ones(1, 40, dtype=torch.bool)
    visible[0, 30:] = False
    shares = list[float]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for future in (0.0, 0.5, 1.0):
            mask = annealed_attention(visible, future)[0, 0]
            assert mask[:30, :30].tril().sum() == 465 and not mask[:30, 30:].any() and mask.diagonal().all()
            shares.append(float(mask[:30, :30].triu(1).sum() / 435))
    assert shares[0] == 0 and shares[1] == pytest.approx(0.5, abs=0.1) and shares[2] == 1


def test_the_first_step_is_the_target_itself() -> None:
    """Causal attention, one mask: the shifted prediction is that of the target."""
    job = task(settings(Path("unused"), recipe="masked_diffusion", options=OPTIONS))
    network, decoder = job.recipe.network, job.setup.decoder
    assert isinstance(network, MaskedDiffusion)
    token = torch.randint(0, 255, (1, 12), generator=torch.Generator().manual_seed(0))
    masked = torch.zeros(1, 12, dtype=torch.bool)
    masked[0, 11] = True
    attended = annealed_attention(torch.ones(1, 12, dtype=torch.bool), 0.0)
    states = full_forward(decoder, decoder.embed(token.flatten()).view(1, 12, -1))
    expected = decoder.logits(decoder.final_norm(states[:, 10]))
    torch.testing.assert_close(network(token, masked, attended), expected, rtol=0, atol=1e-4)


def test_the_predictor_is_the_trained_network() -> None:
    job = task(settings(Path("unused"), recipe="masked_diffusion", options=OPTIONS))
    network = job.recipe.network
    assert isinstance(network, MaskedDiffusion)
    with torch.no_grad():
        network.mask_embedding.add_(0.3)
        token = torch.randint(0, 255, (1, 10), generator=torch.Generator().manual_seed(0))
        masked = torch.zeros(1, 10, dtype=torch.bool)
        masked[0, [3, 4, 8]] = True
        expected = network(token, masked, None)
    p = network.to_predictor(torch.float32)
    noisy = token[0].masked_fill(masked[0], 255)
    found = p.read(p.new_store(10), noisy, 0, [3, 4, 8])
    expected[:, 255] = float("-inf")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_training_lowers_the_bound_and_writes_a_drafter_and_a_model(tmp_path: Path) -> None:
    wanted = settings(
        tmp_path, recipe="masked_diffusion", options=OPTIONS, steps=60, batch_tokens=512, lr=1e-2, measure_every=30
    )
    done = trainer(wanted)
    done.run()
    found = losses(done)
    assert sum(found[-15:]) < 0.9 * sum(found[:15]) and done.curve[0].metrics["future"] == 0
    assert all(b.metrics["future"] >= a.metrics["future"] for a, b in pairwise(done.curve))
    embedding = done.job.model.checkpoint.embedding_and_head(torch.float32)
    drafter, model = load_own(tmp_path, embedding), load_diffusion(str(tmp_path / "model"))
    assert isinstance(drafter, MaskedDiffusion) and model.config.mask == 255 and model.config.shifted
    token = torch.tensor([*range(5, 15), 255, 255])
    predictors = drafter.to_predictor(torch.float32), model.predictor
    one, other = (p.read(p.new_store(12), token, 0, [10, 11]) for p in predictors)
    torch.testing.assert_close(one, other, rtol=0, atol=0.05)
    data = [(torch.from_numpy(d.tokens).long(), d.start) for d in (done.job.data[0][i] for i in range(4))]
    report = evaluate(model.predictor, data, done.job.setup.decoder, samples=2, masks=3, cuts=4)
    assert report.perplexity_bound > 1 and 0 <= report.accuracy <= 1 and len(report.same_top) == 3
    assert report.sibling_perplexity is not None and report.sibling_perplexity < 257


def test_the_bound_of_an_oracle_is_one() -> None:
    """A model that knows the text has the perplexity 1 and agrees with a sibling that knows it too."""
    text = torch.arange(20)

    class Oracle:
        mask = 25

        def new_store(self, length: int) -> None:
            return None

        def read(self, store: None, token: torch.Tensor, begin: int, positions: list[int]) -> torch.Tensor:
            return torch.nn.functional.one_hot(text[torch.tensor(positions).clamp(max=19)], 26) * 50.0

    report = evaluate(Oracle(), [(text, 6)], samples=3)  # type: ignore[arg-type]
    assert report.perplexity_bound == pytest.approx(1.0) and report.accuracy == 1 and report.tokens == 14


def test_a_prompt_is_never_masked() -> None:
    job = task(settings(Path("unused"), recipe="masked_diffusion", options=OPTIONS))
    recipe, seen = job.recipe, list[torch.Tensor]()
    assert isinstance(recipe, MaskedDiffusionRecipe)

    class Spy(torch.nn.Module):
        def forward(self, token: torch.Tensor, masked: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
            seen.append(masked)
            out: torch.Tensor = recipe.network(token, masked, attended)
            return out

    token = torch.randint(0, 255, (3, 16), generator=torch.Generator().manual_seed(1))
    learned = torch.zeros(3, 16, dtype=torch.bool)
    learned[0, 6:12], learned[1, 0:16], learned[2, 15] = True, True, True
    recipe.loss(Spy(), Batch(token, learned, ()))
    assert not (seen[0] & ~learned).any() and not seen[0][:, 0].any() and seen[0].any(1).all()


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    given = ("--model", tiny_target(), "--data", shared(), "--out", tmp_path, "--measure-prompts", "3")
    command = ("train", "masked_diffusion", *given)
    text = expect_error(*command, "--set", "mask_token=257", "--batch-tokens", "128")
    assert "mask_token=257: outside the target's vocabulary, which has 257 tokens" in text
    text = expect_error(*command, "--batch-tokens", "128")
    assert "a special token that the chat template does not use, and there is none" in text


def test_the_command_evaluates(tmp_path: Path) -> None:
    done = trainer(settings(tmp_path, recipe="masked_diffusion", options=OPTIONS, steps=1, measure_every=0))
    done.run()
    command = ("diffusion", "evaluate", "--model", tmp_path / "model", "--data", shared(), "--documents", "2")
    found = run_foretell(*command, "--sibling", tiny_target(), "--samples", "1", "--masks", "2", "--cuts", "2")
    assert found.exit_code == 0 and "same top token as" in found.stdout
    text = expect_error("diffusion", "generate", "Hi", "--model", tmp_path)
    assert "the model that it belongs to is in" in text
    assert target(str(tiny_target())).config.vocab == 257
