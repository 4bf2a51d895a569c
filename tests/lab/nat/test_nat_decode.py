"""Decoding that is not left to right: the invariants of mask-predict, fertilities and denoising, and losslessness."""

from itertools import pairwise

import pytest
import torch
from nat_helpers import SOURCES, model, targets

from foretell.lab.nat.decode import (
    DecodeOptions,
    denoise,
    least_confident,
    mask_predict,
    masked_count,
    predict,
    sequence_log_probability,
    translate,
)
from foretell.lab.nat.lossless import translate_verified
from foretell.lab.nat.network import Kind, NatModel, causal_mask, padding_mask
from foretell.lab.nat.objective import autoregressive_inputs
from foretell.lab.nat.pairs import BEGIN, END, PAD, UNKNOWN, pad

DRAFTERS: tuple[Kind, ...] = ("cmlm", "glat", "fertility", "sundae")


def greedy(verifier: NatModel, source: list[int]) -> list[int]:
    """Reference of greedy decoding: one pass over everything per token, without a cache."""
    memory, out = verifier.encode(pad([source])), list[int]()
    while len(out) < verifier.config.max_target:
        inputs = torch.tensor([[BEGIN, *out]])
        logits = verifier.decode(verifier.embed(inputs), memory, causal_mask(len(out) + 1)).logits
        token = int(logits[0, -1].argmax())
        if token == END:
            break
        out.append(token)
    return out


def test_decoding_with_a_cache_is_decoding_without() -> None:
    verifier = model("autoregressive")
    assert translate(verifier, SOURCES, DecodeOptions()).tokens == [greedy(verifier, s) for s in SOURCES]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("seed", range(4))
def test_verified_drafts_are_greedy_decoding(kind: Kind, seed: int) -> None:
    verifier, drafter = model("autoregressive", seed), model(kind, seed + 1)
    for source in SOURCES:
        found = translate_verified(verifier, drafter, source, DecodeOptions())
        assert list(found.tokens) == greedy(verifier, source)


def test_a_perfect_draft_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, drafter = model("autoregressive"), model("cmlm")
    for source in SOURCES:
        expected = greedy(verifier, source)
        monkeypatch.setattr(
            "foretell.lab.nat.lossless._Draft.after", lambda self, decided, e=expected: [*e[len(decided) :], END]
        )
        found = translate_verified(verifier, drafter, source, DecodeOptions())
        assert found.passes == 1 and list(found.tokens) == expected


def test_masked_counts_and_kept_tokens() -> None:
    length = torch.tensor([7, 3, 1])
    assert [masked_count(length, t, 4).tolist() for t in range(4)] == [[7, 3, 1], [5, 2, 1], [3, 1, 1], [1, 1, 1]]
    real = torch.arange(7) < length[:, None]
    confidence = torch.rand(3, 7, generator=torch.Generator().manual_seed(0))
    for t in range(1, 4):
        masked = least_confident(confidence, masked_count(length, t, 4), real)
        assert masked.sum(1).tolist() == masked_count(length, t, 4).tolist() and not (masked & ~real).any()
        assert all(confidence[i][masked[i]].max() <= confidence[i][real[i] & ~masked[i]].min() for i in range(2))


def test_a_pass_of_mask_predict_changes_masked_tokens_only() -> None:
    cmlm = model("cmlm")
    length = torch.tensor([9, 5, 3])
    memory, real = cmlm.encode(pad(SOURCES[:3])), torch.arange(9) < length[:, None]
    states = [mask_predict(cmlm, memory, length, real, k) for k in range(1, 2)]
    # Iterations of one decoding: the prefix of a decoding with K passes is not one with fewer, so follow it by hand.
    token, confidence = states[0]
    masked = least_confident(confidence, masked_count(length, 1, 2), real)
    both, _ = mask_predict(cmlm, memory, length, real, 2)
    assert torch.equal(both[~masked], token[~masked])


def test_one_iteration_is_one_pass_over_masks() -> None:
    glat = model("glat")
    memory, length = glat.encode(pad([SOURCES[0]])), torch.tensor([5])
    real = torch.ones(1, 5, dtype=torch.bool)
    token, _ = mask_predict(glat, memory, length, real, 1)
    assert torch.equal(token, predict(glat, memory, torch.full((1, 5), 3), length).argmax(-1))


def test_padding_changes_nothing_and_the_decoder_is_not_causal() -> None:
    cmlm = model("cmlm")
    token, length = targets()
    memory = cmlm.encode(pad(SOURCES[:3]))
    noise = torch.where(token == PAD, 7, token)
    real = token != PAD
    assert torch.equal(predict(cmlm, memory, token, length)[real], predict(cmlm, memory, noise, length)[real])
    late = token.clone()
    late[1, 8] = 6 if late[1, 8] != 6 else 7
    assert (predict(cmlm, memory, late, length)[1, 0] != predict(cmlm, memory, token, length)[1, 0]).any()
    alone = cmlm.encode(pad([SOURCES[1]]))
    torch.testing.assert_close(
        predict(cmlm, alone, token[1:2], length[1:2]), predict(cmlm, memory, token, length)[1:2], rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("kind", ["cmlm", "sundae"])
def test_one_length_candidate_decodes_the_most_probable_length(kind: Kind) -> None:
    made = model(kind)
    memory = made.encode(pad(SOURCES))
    lengths = (memory.length_logits.argmax(1) + 1).tolist()
    found = translate(made, SOURCES, DecodeOptions(length_candidates=1))
    assert [len(t) for t in found.tokens] == lengths
    one_by_one = [translate(made, [s], DecodeOptions(length_candidates=1)).tokens[0] for s in SOURCES]
    if kind == "cmlm":
        assert one_by_one == list(found.tokens)


def test_more_candidates_never_lower_the_mean_log_probability() -> None:
    cmlm, scores = model("cmlm"), list[float]()
    for count in (1, 3, 9):
        out = translate(cmlm, [SOURCES[0]], DecodeOptions(length_candidates=count, iterations=1)).tokens[0]
        length = torch.tensor([len(out)])
        memory = cmlm.encode(pad([SOURCES[0]]))
        _, confidence = mask_predict(cmlm, memory, length, torch.ones(1, len(out), dtype=torch.bool), 1)
        scores.append(float(confidence.mean()))
    assert all(b >= a for a, b in pairwise(scores))


def test_denoising_stops_at_a_fixed_point() -> None:
    sundae, options = model("sundae"), DecodeOptions(iterations=200)
    memory, length = sundae.encode(pad([SOURCES[2]])), torch.tensor([4])
    token = torch.randint(UNKNOWN + 1, 15, (1, 4), generator=torch.Generator().manual_seed(1))
    settled, _, passes = denoise(sundae, memory, token, length, options)
    if passes < 200:
        again, _, more = denoise(sundae, memory, settled, length, options.model_copy(update={"update_share": 1.0}))
        worst = int(predict(sundae, memory, settled, length).gather(-1, settled[..., None]).argmin())
        assert int(predict(sundae, memory, settled, length)[0, worst].argmax()) == int(settled[0, worst])
        assert more <= 200 and again.shape == settled.shape


def test_noisy_parallel_decoding_takes_what_the_teacher_prefers() -> None:
    teacher, student = model("autoregressive", 3), model("fertility")
    options = DecodeOptions(fertility_samples=12)
    memory = teacher.encode(pad([SOURCES[2]]))

    def score(tokens: list[int]) -> float:
        return float(sequence_log_probability(teacher, memory, torch.tensor([tokens]), torch.tensor([len(tokens)])))

    plain = list(translate(student, [SOURCES[2]], DecodeOptions()).tokens[0])
    chosen = list(translate(student, [SOURCES[2]], options, teacher).tokens[0])
    assert score(chosen) >= score(plain)
    with pytest.raises(ValueError, match="autoregressive teacher"):
        translate(student, [SOURCES[2]], options)


def test_the_score_of_a_sequence_is_the_sum_of_its_steps() -> None:
    teacher, tokens = model("autoregressive"), [6, 7, 8]
    memory = teacher.encode(pad([SOURCES[0]]))
    inputs = autoregressive_inputs(torch.tensor([tokens]))
    steps = teacher.decode(teacher.embed(inputs), memory, causal_mask(4)).logits[0].log_softmax(-1)
    expected = sum(float(steps[i, t]) for i, t in enumerate([*tokens, END])) / 4
    # In a batch with a longer one, padding is left out.
    token, length = pad([tokens, [6, 6, 6, 6, 6]]), torch.tensor([3, 5])
    found = sequence_log_probability(teacher, memory.repeat(2), token, length)
    assert float(found[0]) == pytest.approx(expected)


def test_too_long_a_source_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="a source has 7 tokens, and this model reads at most 6"):
        translate(model("cmlm"), [[5] * 7], DecodeOptions())


def test_a_mask_of_padding_covers_each_row() -> None:
    assert padding_mask(torch.tensor([1, 3]), 3)[:, 0, 0].tolist() == [[True, False, False], [True, True, True]]
