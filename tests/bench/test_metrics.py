"""Figures of records written by hand, against arithmetic done by hand."""

import pytest
from bench_helpers import record, turn

from foretell.bench.results import collect
from foretell.bench.metrics import DEFINITIONS, figures, mean, per_question, spec_bench
from foretell.bench.report import markdown
from foretell.bench.schema import Divergence, Record, Settings

PLAIN = [record("a", "autoregressive/x", (turn(5, 5, (1.0, 2.0, 3.0, 4.0, 5.0), (1, 1, 1, 1, 1)),))]
MINE = [record("a", "ngram/x", (turn(5, 3, (1.0, 1.5, 2.0), (1, 3, 1)),))]


def test_counts_and_acceptance() -> None:
    f = figures(MINE, PLAIN, {})
    assert (f.tokens, f.passes, f.tokens_per_pass, f.accepted_per_pass) == (5, 3, 5 / 3, 1.0)
    assert f.acceptance_conditional == (2 / 2, 1 / 2) and f.acceptance_cumulative == (2 / 3, 1 / 3)


def test_speed_leaves_the_prefill_out_and_the_ratio_is_over_plain_decoding() -> None:
    f = figures(MINE, PLAIN, {"peer": PLAIN})
    assert f.tokens_per_second == pytest.approx(4 / 1.0)
    assert f.speedup == pytest.approx(4.0) and f.over_peers == {"peer": pytest.approx(4.0)}
    assert f.end_to_end_tokens_per_second == pytest.approx(5 / 2) and f.end_to_end_speedup == pytest.approx(2.5)
    assert f.prefill_seconds == 1.0


def test_tokens_that_arrive_together_share_the_wait() -> None:
    f = figures(MINE, PLAIN, {})
    assert f.inter_token_p50_ms == pytest.approx((500 / 3 + 500 / 3) / 2)
    assert f.gap_p95_ms == pytest.approx(500)
    assert (f.draft_share, f.verify_share, f.other_share) == pytest.approx((0.1, 0.6, 0.3))


def test_times_are_medians_over_the_repeats() -> None:
    slow = record("a", "ngram/x", (turn(5, 3, (9.0, 9.5, 20.0), (1, 3, 1)),), repeat=1)
    third = record("a", "ngram/x", (turn(5, 3, (1.0, 2.0, 3.0), (1, 3, 1)),), repeat=2)
    (q,) = per_question([slow, *MINE, third])
    assert (q.decode_seconds, q.total_seconds, q.tokens, q.passes) == (2.0, 3.0, 5, 3)


def test_only_questions_that_both_answered_are_compared() -> None:
    extra = record("b", "ngram/x", (turn(5, 3, (1.0, 100.0), (1, 4)),))
    assert figures([*MINE, extra], PLAIN, {}).speedup == pytest.approx(4.0)


def test_spec_bench_takes_means_of_rates_with_the_prefill_inside() -> None:
    other = record("b", "autoregressive/x", (turn(4, 4, (1.0, 2.0, 3.0, 4.0), (1, 1, 1, 1)),), category="rag")
    fast = record("b", "ngram/x", (turn(4, 1, (1.0,), (4,)),), category="rag")
    s = spec_bench([*MINE, fast], [*PLAIN, other])
    assert s.mat == pytest.approx(9 / 4)
    assert s.speedup == pytest.approx({"qa": 2.5, "rag": 4.0})
    assert s.overall == pytest.approx(((5 / 2 + 4) / 2) / ((1 + 1) / 2))


def test_a_mean_is_over_categories() -> None:
    a, b = figures(MINE, PLAIN, {}), figures(PLAIN, PLAIN, {})
    assert mean([a, b]).speedup == pytest.approx(2.5)


def test_the_report_tells_everything() -> None:
    away = Divergence(question="a", turn=0, position=2, token=5, plain=6, margin=0.0125)
    lost = Record(question="b", category="qa", group="qa", contender="ngram/x", repeat=0, refused="too long")
    mine = [MINE[0].model_copy(update={"compared": True, "divergence": away}), lost]
    settings = Settings(
        model="m", tasks="t", digest="d", max_new_tokens=5, temperature=0, seed=0, threads=1, dtypes=("x",)
    )
    results = collect([*PLAIN, *mine], settings, {"autoregressive/x": True, "ngram/x": True}, {"ngram/x": 5_000_000})
    text = markdown(results)
    assert "| ngram/x | 1.67 | 4.00 | 4.00 | 0/1 | 5 |" in text
    assert "0.0125" in text and "too long" in text and "#MAT" in text
    assert all(name in text for name in DEFINITIONS)
