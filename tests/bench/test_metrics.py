"""Metrics of results written by hand, compared with arithmetic done by hand."""

import pytest
from bench_helpers import make_answer, make_result

from foretell.bench.metrics import DEFINITIONS, category_means, compute_metrics, question_metrics, spec_bench_metrics
from foretell.bench.report import render_markdown
from foretell.bench.results import build_results
from foretell.bench.schema import AnswerDivergence, BenchSettings, QuestionResult

PLAIN = [make_result("a", "autoregressive/x", (make_answer(5, 5, (1.0, 2.0, 3.0, 4.0, 5.0), (1, 1, 1, 1, 1)),))]
MINE = [make_result("a", "ngram/x", (make_answer(5, 3, (1.0, 1.5, 2.0), (1, 3, 1)),))]


def test_counts_and_acceptance() -> None:
    m = compute_metrics(MINE, PLAIN, {})
    assert (m.tokens, m.passes, m.tokens_per_pass, m.accepted_per_pass) == (5, 3, 5 / 3, 1.0)
    assert m.acceptance_conditional == (2 / 2, 1 / 2) and m.acceptance_cumulative == (2 / 3, 1 / 3)


def test_speed_excludes_prefill_and_the_speedup_is_over_plain_decoding() -> None:
    m = compute_metrics(MINE, PLAIN, {"peer": PLAIN})
    assert m.tokens_per_second == pytest.approx(4 / 1.0)
    assert m.speedup == pytest.approx(4.0) and m.over_peers == {"peer": pytest.approx(4.0)}
    assert m.end_to_end_tokens_per_second == pytest.approx(5 / 2) and m.end_to_end_speedup == pytest.approx(2.5)
    assert m.prefill_seconds == 1.0


def test_tokens_that_arrive_together_share_the_inter_token_time() -> None:
    m = compute_metrics(MINE, PLAIN, {})
    assert m.inter_token_p50_ms == pytest.approx((500 / 3 + 500 / 3) / 2)
    assert m.gap_p95_ms == pytest.approx(500)
    assert (m.draft_share, m.verify_share, m.other_share) == pytest.approx((0.1, 0.6, 0.3))


def test_times_are_medians_over_the_repeats() -> None:
    slow = make_result("a", "ngram/x", (make_answer(5, 3, (9.0, 9.5, 20.0), (1, 3, 1)),), repeat=1)
    third = make_result("a", "ngram/x", (make_answer(5, 3, (1.0, 2.0, 3.0), (1, 3, 1)),), repeat=2)
    (q,) = question_metrics([slow, *MINE, third])
    assert (q.decode_seconds, q.total_seconds, q.tokens, q.passes) == (2.0, 3.0, 5, 3)


def test_only_questions_that_both_answered_are_compared() -> None:
    extra = make_result("b", "ngram/x", (make_answer(5, 3, (1.0, 100.0), (1, 4)),))
    assert compute_metrics([*MINE, extra], PLAIN, {}).speedup == pytest.approx(4.0)


def test_spec_bench_takes_means_of_rates_with_the_prefill_inside() -> None:
    other = make_result(
        "b", "autoregressive/x", (make_answer(4, 4, (1.0, 2.0, 3.0, 4.0), (1, 1, 1, 1)),), category="rag"
    )
    fast = make_result("b", "ngram/x", (make_answer(4, 1, (1.0,), (4,)),), category="rag")
    s = spec_bench_metrics([*MINE, fast], [*PLAIN, other])
    assert s.mean_accepted_tokens == pytest.approx(9 / 4)
    assert s.speedup == pytest.approx({"qa": 2.5, "rag": 4.0})
    assert s.overall == pytest.approx(((5 / 2 + 4) / 2) / ((1 + 1) / 2))


def test_a_mean_is_over_categories() -> None:
    a, b = compute_metrics(MINE, PLAIN, {}), compute_metrics(PLAIN, PLAIN, {})
    assert category_means([a, b]).speedup == pytest.approx(2.5)


def test_the_report_has_every_table() -> None:
    divergence = AnswerDivergence(question="a", turn=0, position=2, token=5, plain_token=6, margin=0.0125)
    failed = QuestionResult(question="b", category="qa", group="qa", competitor="ngram/x", repeat=0, error="too long")
    mine = [MINE[0].model_copy(update={"compared": True, "divergence": divergence}), failed]
    settings = BenchSettings(
        model="m", tasks="t", digest="d", max_new_tokens=5, temperature=0, seed=0, threads=1, dtypes=("x",)
    )
    results = build_results(
        [*PLAIN, *mine], settings, {"autoregressive/x": True, "ngram/x": True}, {"ngram/x": 5_000_000}
    )
    text = render_markdown(results)
    assert "| ngram/x | 1.67 | 4.00 | 4.00 | 0/1 | 5 |" in text
    assert "0.0125" in text and "too long" in text and "#MAT" in text
    assert all(name in text for name in DEFINITIONS)
