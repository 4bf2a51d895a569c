"""Costs against an independent closed form, and relations that must hold between them."""

from dataclasses import replace

import numpy as np
import pytest

from foretell.roofline.analysis import AnalyzedModel, analyse, predict_seconds
from foretell.roofline.cost import scalar
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import known_hardware
from foretell.roofline.linear_cost import attention_pairs, expected_active_experts, independent_rows, kv_positions_read
from foretell.roofline.model_configs import find_model
from foretell.roofline.workload import Workload

HARDWARE = known_hardware()


def model(name: str) -> AnalyzedModel:
    return AnalyzedModel(*find_model(name))


def closed_form(name: str, n: int, b: int, s: int) -> tuple[float, float]:
    """OPs and bytes of a dense gated model with fused attention, 16 bits, derived by hand and not from the operation
    list.
    """
    c = model(name).config
    big = b * n
    h, d, q, k, f = c.hidden, c.head_dim, c.heads, c.kv_heads, c.ffn
    weights = h * d * q * 2 + 2 * h * d * k + 3 * h * f
    biases = (q + 2 * k) * d if c.qkv_bias else 0
    pairs = b * (n * s + n * (n + 1) / 2)
    ops = 2 * big * weights + pairs * (4 * q * d + 5 * q)
    ops += big * (2 * 4 * h + 2 * h + 3 * (q + k) * d + 5 * f)
    # Norms, projections, rotation, attention, output, two additions, gated feed-forward: elements read and written per
    # row.
    rows = 4 * h + (3 * h + q * d) + 2 * (q + k) * d + 2 * q * d + (q * d + h) + 6 * h + (2 * h + 5 * f) + (f + h)
    moved = weights + biases + 2 * h + big * (rows + 2 * k * d) + b * (s + n) * 2 * k * d
    head_ops = big * (2 * h * c.vocab + 4 * h)
    head_bytes = h * c.vocab + h + big * (2 * h + 2 * h + h + c.vocab)
    return c.layers * ops + head_ops, 2 * (c.layers * moved + head_bytes)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "qwen2.5-7b"])
@pytest.mark.parametrize(("n", "b", "s"), [(1, 1, 0), (1, 4, 1000), (8, 2, 4096), (64, 64, 16000)])
def test_totals_equal_the_closed_form(name: str, n: int, b: int, s: int) -> None:
    found = analyse(model(name), HARDWARE["a100-80g"], Workload("verify", b, s, n)).total
    ops, moved = closed_form(name, n, b, s)
    assert scalar(found.ops) == pytest.approx(ops, rel=1e-12)
    assert scalar(found.bytes) == pytest.approx(moved, rel=1e-12)


def test_attention_pairs_and_positions_equal_enumeration() -> None:
    for tokens in (1, 2, 5, 9):
        for past in (0, 1, 4, 20):
            for window in (0, 1, 3, 8):
                seen = [{k for k in range(past + i + 1) if not window or past + i - k < window} for i in range(tokens)]
                assert float(attention_pairs(tokens, past, window, False)) == sum(map(len, seen))
                assert float(kv_positions_read(tokens, past, window)) == len(set().union(*seen))


def test_verifying_one_token_is_decoding() -> None:
    for name in ("llama-3-8b", "mixtral-8x7b", "gemma-3-4b", "deepseek-v3", "opt-6.7b"):
        workload = Workload("verify", 4, 2000, 1)
        decode = predict_seconds(model(name), HARDWARE["h100-sxm"], replace(workload, stage="decode"))
        assert predict_seconds(model(name), HARDWARE["h100-sxm"], workload) == decode


def test_time_never_falls_with_more_work() -> None:
    for name in ("llama-3-8b", "mixtral-8x7b", "gemma-2-9b", "deepseek-v3"):
        a100, b = HARDWARE["a100-80g"], Workload("verify", 2, 500, 4)
        wider, fuller, longer = (
            [replace(b, tokens=n) for n in (1, 2, 7, 64)],
            [replace(b, batch=n) for n in (1, 3, 40)],
            [replace(b, context=n) for n in (0, 10, 5000)],
        )
        for workloads in (wider, fuller, longer):
            times = [predict_seconds(model(name), a100, workload) for workload in workloads]
            assert times == sorted(times)


VERIFICATION = {
    ("llama-2-7b", "a100-80g"): ((1.00, 1.00, 1.02, 1.04), (1.01, 1.04, 2.48, 4.57), (1.01, 1.67, 4.53, 8.34)),
    ("llama-3-8b", "a100-80g"): ((1.00, 1.00, 1.02, 1.04), (1.01, 1.05, 3.11, 6.16), (1.02, 2.50, 8.92, 17.6)),
    ("mixtral-8x7b", "h100-sxm"): ((1.66, 3.29, 3.65, 3.67), (1.01, 1.02, 1.09, 1.19), (1.01, 1.06, 1.87, 3.66)),
}
"""T(n) / T(1) at 1k context for n = 2, 8, 32, 64 and batch 1, 16, 64, from an independent derivation."""


@pytest.mark.parametrize("pair", VERIFICATION)
def test_the_cost_of_verification(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference routes every token independently."""
    monkeypatch.setattr("foretell.roofline.linear_cost.SHARED_ROUTING", 0.0)
    name, device = pair
    for batch, row in zip((1, 16, 64), VERIFICATION[pair], strict=True):
        one = predict_seconds(model(name), HARDWARE[device], Workload("verify", batch, 1024, 1, fusion="full"))
        for n, expected in zip((2, 8, 32, 64), row, strict=True):
            found = (
                predict_seconds(model(name), HARDWARE[device], Workload("verify", batch, 1024, n, fusion="full")) / one
            )
            assert found == pytest.approx(expected, rel=0.04), (batch, n)


def test_recurrent_layers_read_their_state_once_per_sequence() -> None:
    """36 layers with 32 states of 128 x 128 and 3 inputs of a convolution over 8192 channels, whatever the context."""
    state = 36 * (32 * 128 * 128 + 3 * 8192) * 2.0
    for batch, tokens, context in ((1, 1, 0), (4, 1, 5000), (4, 8, 5000)):
        found = analyse(model("qwen3-next-80b-a3b"), HARDWARE["h200"], Workload("verify", batch, context, tokens))
        keys = 12 * 2 * 2 * 256 * 2.0
        assert scalar(found.total.kv_read) == pytest.approx(batch * (state + keys * (context + tokens)))
        assert scalar(found.total.kv_write) == pytest.approx(batch * (state + keys * tokens))
        assert scalar(found.memory.kv) == pytest.approx(batch * (state + keys * (context + tokens)))


def test_mixtral_has_its_parameters_and_activates_its_experts() -> None:
    mixtral = model("mixtral-8x7b")
    assert mixtral.graph("flash", False).parameters == pytest.approx(46.70e9, rel=1e-3)
    table = {1: 2, 2: 3.5, 4: 5.47, 8: 7.2, 16: 7.92, 32: 8.0}
    assert [float(expected_active_experts(8, 2, n)) for n in table] == pytest.approx(list(table.values()), abs=0.01)
    decode = analyse(mixtral, HARDWARE["h100-sxm"], Workload(context=0))
    assert scalar(decode.total.weights) / 2 == pytest.approx(12.88e9 - 32000 * 4096, rel=2e-3)


def test_neighbouring_tokens_share_experts() -> None:
    mixtral = model("mixtral-8x7b")

    def experts_read(batch: int, tokens: int) -> float:
        total = analyse(mixtral, HARDWARE["h100-sxm"], Workload("verify", batch, 0, tokens)).total
        return scalar(total.weights)

    assert experts_read(1, 8) < experts_read(8, 1)
    assert expected_active_experts(8, 2, independent_rows(1.0)) == pytest.approx(2)
    assert float(independent_rows(8.0)) == pytest.approx(1 + 7 * 0.85)


def test_gpus_multiply_32_bits_at_their_vector_rate() -> None:
    full = parse_format("32")
    assert HARDWARE["a100-80g"].peak(full, full) == 19.5e12
    with pytest.raises(ValueError, match="states no rate that can multiply fp32"):
        HARDWARE["aim"].peak(full, full)


def test_an_expert_count_of_one_is_a_dense_feed_forward() -> None:
    dense = model("mistral-7b").config
    sparse = replace(model("mixtral-8x7b").config, window=0, window_layers=())
    assert sparse.experts is not None
    one = replace(sparse.experts, count=1, active=1)
    for b, n in ((1, 1), (8, 16)):
        workload = Workload("verify", b, 300, n)
        mix = analyse(AnalyzedModel("one", replace(sparse, experts=one)), HARDWARE["a100-80g"], workload)
        plain = analyse(
            AnalyzedModel("dense", replace(dense, window=0, window_layers=())), HARDWARE["a100-80g"], workload
        )
        extra = sum(
            scalar(line.cost.ops) * line.count for line in mix.op_costs if line.op.name in ("router", "combine")
        )
        assert scalar(mix.total.ops) - extra == scalar(plain.total.ops)


def test_a_sliding_window_bounds_cache_and_reads() -> None:
    near, far = (analyse(model("mistral-7b"), HARDWARE["a100-80g"], Workload(context=s)) for s in (4096, 30000))
    assert scalar(near.total.kv_read) == scalar(far.total.kv_read)
    assert scalar(near.memory.kv) == scalar(far.memory.kv)


def test_latent_attention_keeps_a_small_cache_and_both_forms_agree_on_weights() -> None:
    deepseek = model("deepseek-v3")
    assert scalar(analyse(deepseek, HARDWARE["b200"], Workload(context=999)).memory.kv) == 61 * 1000 * 576 * 2
    assert deepseek.graph("flash", False).parameters == deepseek.graph("flash", True).parameters == 671026419200


def test_formats_set_bytes_and_peaks() -> None:
    a6000, h100 = HARDWARE["a6000"], HARDWARE["h100-sxm"]
    w4, w8, w16, f8 = (parse_format(t) for t in ("4", "8", "16", "fp8"))
    assert a6000.peak(w4, w16) == a6000.peaks["fp16"] and a6000.peak(w8, w8) == a6000.peaks["int8"]
    assert a6000.peak(w4, w4) == a6000.peaks["int4"] and h100.peak(w4, w4) == h100.peaks["int8"]
    assert h100.peak(f8, f8) == h100.peaks["fp8"] and a6000.peak(f8, f8) == a6000.peaks["fp16"]
    assert parse_format("2g32z").bytes == 0.375 and parse_format("4g128").bytes == (4 + 16 / 128) / 8


def test_tensor_parallelism_divides_work_and_adds_communication() -> None:
    one, four = (
        analyse(model("llama-3-70b"), HARDWARE["h100-sxm"], Workload("prefill", 1, 4096, devices=t)) for t in (1, 4)
    )
    assert scalar(four.total.link) == pytest.approx((80 * 2 * 2 * 4096 * 8192 + 128256) * 2 * 3 / 4)
    assert scalar(one.total.link) == 0 and not one.fits and four.fits
    assert 1 / 4 < four.seconds / one.seconds < 0.5
    assert (
        sum(scalar(line.cost.ops) for line in four.op_costs if line.op.name == "q_proj") == 2 * 4096 * 8192 * 8192 / 4
    )


def test_chat_is_its_prefill_and_its_decodes() -> None:
    m, h = model("deepseek-v3"), HARDWARE["b200"]
    chat = predict_seconds(m, h, Workload("chat", 2, 300, generate=7))
    parts = predict_seconds(m, h, Workload("prefill", 2, 300)) + sum(
        predict_seconds(m, h, Workload("decode", 2, 300 + i)) for i in range(7)
    )
    assert chat == pytest.approx(parts, rel=1e-12)


def test_one_chunk_is_a_prefill_and_small_chunks_read_the_cache_again() -> None:
    m, h = model("llama-3-8b"), HARDWARE["a100-80g"]
    whole = analyse(m, h, Workload("prefill", 1, 4096))
    assert analyse(m, h, Workload("chunked", 1, 4096, chunk=4096)).seconds == pytest.approx(whole.seconds, rel=1e-12)
    cut = analyse(m, h, Workload("chunked", 1, 4096, chunk=512))
    per_token = 2 * 32 * 8 * 128 * 2
    assert scalar(cut.total.kv_read) - scalar(whole.total.kv_read) == per_token * 4096 * (4096 - 512) / (2 * 512)
    assert scalar(cut.total.ops) - scalar(whole.total.ops) == 0


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    m, h = model("llama-2-13b"), HARDWARE["a6000"]
    for workload in (Workload(context=1024), Workload("prefill", 1, 512), Workload("chat", 2, 100)):
        found = analyse(m, h, workload)
        assert found.largest_batch and found.longest_context
        assert analyse(m, h, replace(workload, batch=found.largest_batch)).fits
        assert not analyse(m, h, replace(workload, batch=found.largest_batch + 1)).fits


def test_peak_activation_is_a_lifetime_peak() -> None:
    activations = analyse(model("llama-2-7b"), HARDWARE["a6000"], Workload("prefill", 1, 2048)).memory.activations
    c = model("llama-2-7b").config
    # Residual stream, the normed input, gate and up, before the product: nothing else is alive in a gated feed-forward.
    assert scalar(activations) == 2 * 2048 * (c.hidden + 3 * c.ffn)
    assert np.isscalar(scalar(activations))
