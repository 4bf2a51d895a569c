"""Metrics of results written by hand, compared with arithmetic done by hand."""

import pytest
from bench_helpers import make_answer, make_result

from foretell.bench.console import print_summary
from foretell.bench.metrics import DEFINITIONS, category_means, compute_metrics, question_metrics, spec_bench_metrics
from foretell.bench.peers.registry import GROUPS, expand_names
from foretell.bench.report import regret_table, render_markdown
from foretell.bench.results import build_results
from foretell.bench.schema import AnswerDivergence, BenchSettings, QuestionResult
from foretell.bench.verdict import verdict

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


def test_the_verdict_names_the_fastest_lossless_method_or_plain_decoding() -> None:
    settings = BenchSettings(
        model="m", tasks="t", digest="d", max_new_tokens=8, temperature=0, seed=0, threads=1, dtypes=("x",)
    )

    def results(*seconds: tuple[str, float], differs: bool = False) -> str:
        """Methods whose five tokens of one category take so long, and twice as long in another; plain decoding takes
        four seconds in both.
        """
        own = [PLAIN[0], PLAIN[0].model_copy(update={"question": "b", "category": "rag"})]
        part = AnswerDivergence(question="a", turn=0, position=1, token=1, plain_token=2, margin=0.0)
        for name, time in seconds:
            for q, category, factor in (("a", "qa", 1), ("b", "rag", 2)):
                answer = make_answer(5, 2, (1.0, 1.0 + factor * time), (1, 4))
                made = make_result(q, f"{name}/x", (answer,), category).model_copy(update={"compared": True})
                own.append(made.model_copy(update={"divergence": part}) if differs and q == "a" else made)
        names = dict.fromkeys(r.competitor for r in own)
        return verdict(build_results(own, settings, {n: n != "lossy/x" for n in names}))

    use = "On this machine use ngram: 3.0 times plain decoding (2.0 to 4.0 by category); "
    assert results(("suffix", 2.0), ("ngram", 1.0), ("lossy", 0.1)) == f"{use}the answers are identical."
    peers = [name.split("/")[0] for name in expand_names([*GROUPS], "float32", has_draft_model=True)]
    assert len(peers) > 10
    assert {results(("ngram", 1.0), (peer, 0.1)) for peer in peers} == {f"{use}the answers are identical."}
    assert results(("ngram", 1.0), differs=True).startswith(f"{use}1 of 2 answers are identical")
    slow = results(("ngram", 4.0))
    assert slow.startswith("On this machine use plain decoding: the fastest method, ngram, has 0.8 times")
    assert results() == "No lossless method was measured beside plain decoding."


def test_the_regret_of_auto_is_over_the_fastest_other_lossless_method_of_each_category(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = BenchSettings(
        model="m", tasks="t", digest="d", max_new_tokens=8, temperature=0, seed=0, threads=1, dtypes=("x",)
    )
    peer = expand_names([*GROUPS], "float32", has_draft_model=False)[0]
    seconds = {
        "autoregressive/x": (4, 4),
        "auto/x": (2, 2),
        "ngram/x": (1.6, 8),
        "lossy/x": (0.1, 0.1),
        peer: (0.1, 0.1),
    }
    answers = [
        make_result(question, name, (answer,), question)
        for name, times in seconds.items()
        for question, time in zip(("qa", "rag"), times, strict=True)
        for answer in [make_answer(5, 2, (1.0, 1.0 + time), (1, 4))]
    ]
    results = build_results(answers, settings, {name: name != "lossy/x" for name in seconds})
    assert regret_table(results).texts() == [
        ["qa", "x", "2.00", "ngram", "2.50", "20.0%"],
        ["rag", "x", "2.00", "autoregressive", "1.00", "-100.0%"],
    ]
    assert "Regret" in render_markdown(results)
    print_summary(results)
    assert "Regret" in capsys.readouterr().out
    others = build_results(answers, settings, dict.fromkeys(("autoregressive/x", "ngram/x"), True))
    assert not regret_table(others).rows and "Regret" not in render_markdown(others)
