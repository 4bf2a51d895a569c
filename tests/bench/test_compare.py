"""Comparisons with intervals, charts and pages."""

from pathlib import Path

import pytest
from bench_helpers import bench, make_answer, make_result, refused

from foretell.bench.charts import draw_charts
from foretell.bench.compare import compare, settings_differences
from foretell.bench.html_report import render_html
from foretell.bench.output import read_results, write_results
from foretell.bench.results import build_results
from foretell.bench.schema import BenchResults, BenchSettings

SETTINGS = BenchSettings(
    model="m", tasks="t", digest="d", max_new_tokens=5, temperature=0, seed=0, threads=1, dtypes=("x",)
)


def results(speed: float, names: tuple[str, ...] = ("autoregressive/x", "ngram@2/x", "ngram@4/x")) -> BenchResults:
    """Eight questions, the methods faster than plain decoding by `speed`, give or take."""
    results_of_questions = []
    for i in range(8):
        for k, name in enumerate(names):
            step = 1.0 if not k else (1 + 0.05 * (i % 3)) / speed
            answer = make_answer(5, 5 - k, tuple(step * j for j in range(1, 6)), (1, 1, 1, 1, 1))
            results_of_questions.append(make_result(f"q{i}", name, (answer,), category="qa" if i % 2 else "rag"))
    return build_results(results_of_questions, SETTINGS, dict.fromkeys(names, True))


def test_the_same_results_show_no_difference() -> None:
    rows = compare(results(2.0), results(2.0))
    assert {(r.ratio, r.low, r.high, r.verdict) for r in rows} == {(1.0, 1.0, 1.0, "unclear")}


def test_a_real_difference_has_an_interval_around_it() -> None:
    rows = {(r.competitor, r.category, r.metric): r for r in compare(results(2.0), results(3.0))}
    r = rows["ngram@2/x", "all", "tokens/s"]
    assert r.ratio == pytest.approx(1.5) and r.low <= 1.5 + 1e-9 and r.high >= 1.5 - 1e-9
    assert r.verdict == "higher" and r.questions == 8
    assert rows["autoregressive/x", "all", "tokens/s"].ratio == 1
    assert rows["ngram@2/x", "qa", "tokens per pass"].questions == 4
    back = {(r.competitor, r.category, r.metric): r for r in compare(results(3.0), results(2.0))}
    assert back["ngram@2/x", "all", "tokens/s"].verdict == "lower"


def test_results_that_share_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="share no competitor"):
        compare(results(2.0), results(2.0, ("suffix/y",)))
    assert settings_differences(results(1.0), results(1.0)) == []


def test_precisions_of_one_method_can_be_compared() -> None:
    other = results(2.0, ("autoregressive/y", "ngram@2/y"))
    assert {r.competitor for r in compare(results(2.0), other)} == {"autoregressive/x", "ngram@2/x"}


def test_every_chart_is_a_png_and_embedded_in_the_html_report(tmp_path: Path) -> None:
    found = draw_charts(results(2.0))
    assert set(found) == {"speedup", "budget", "time", "pareto"}
    assert all(png.startswith(b"\x89PNG") for png in found.values())
    page = render_html(results(2.0), found)
    assert page.count("data:image/png;base64,") == 4 and "http" not in page.split("</style>")[1]


def test_files_are_written_read_and_compared(tmp_path: Path) -> None:
    write_results(tmp_path / "a", results(2.0))
    write_results(tmp_path / "b", results(3.0))
    assert read_results(tmp_path / "a") == read_results(tmp_path / "a" / "results.json")
    compared = bench("compare", tmp_path / "a", tmp_path / "b")
    assert compared.exit_code == 0 and "higher" in compared.stdout
    assert bench("report", tmp_path / "a", "--out", tmp_path / "c").exit_code == 0
    assert (tmp_path / "c" / "report.html").read_text() == (tmp_path / "a" / "report.html").read_text()


@pytest.mark.parametrize(("content", "words"), [(None, "no results here"), ("{}", "not results"), ("{", "not results")])
def test_a_file_without_results_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    assert words in refused("compare", tmp_path, tmp_path)


def test_results_of_an_older_format_are_refused(tmp_path: Path) -> None:
    write_results(tmp_path, results(2.0))
    file = tmp_path / "results.json"
    file.write_text(file.read_text().replace("foretell bench 2", "foretell bench 1"))
    message = refused("compare", tmp_path, tmp_path)
    assert "the format 'foretell bench 1', this version of foretell reads 'foretell bench 2'; run again" in message
