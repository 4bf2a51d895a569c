"""`foretell bench run`, `record` and `step` from end to end on a tiny model, and everything a user can get wrong."""

import builtins
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_helpers import bench, draft, make_result, refused, target

from foretell.bench.questions import in_turns, load_questions
from foretell.bench.run import BenchRun
from foretell.bench.schema import BenchResults, BenchSettings, QuestionResult
from foretell.utils.store import RECORDS_FILE, RunStore


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    lines = [
        {"question_id": 1, "category": "qa", "turns": ["abcabc", "more abc"]},
        {"question_id": 2, "category": "rag", "turns": ["1212"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def run(questions: Path, out: Path, *more: str) -> list[str]:
    fixed = [
        "--model",
        target(),
        "--dtype",
        "float32",
        "--max-new-tokens",
        8,
        "--methods",
        "ngram,suffix@4",
        "--repeats",
        1,
        "--no-memory",
    ]
    return ["run", "--tasks", str(questions), "--out", str(out), *map(str, fixed), *more]


def test_a_run_writes_results_that_resume_and_compare(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = bench(*run(questions, out))
    assert result.exit_code == 0, result.output
    found = BenchResults.model_validate_json((out / "results.json").read_bytes())
    assert [c.name for c in found.competitors] == ["autoregressive/float32", "ngram/float32", "suffix@4/float32"]
    assert all(c.identical == c.compared for c in found.competitors) and found.competitors[1].compared == 2
    assert found.competitors[0].pooled.tokens_per_pass == 1.0 and found.settings.tasks == str(questions)
    assert (out / "report.md").read_text().startswith("# Decoding methods") and (out / "report.html").is_file()
    lines = (out / RECORDS_FILE).read_text()
    assert bench(*run(questions, out)).exit_code == 0
    assert (out / RECORDS_FILE).read_text() == lines
    assert bench(*run(questions, out, "--repeats", "2")).exit_code == 0
    assert (out / RECORDS_FILE).read_text().startswith(lines) and len((out / RECORDS_FILE).read_text()) > len(lines)


def test_a_quick_run_names_its_folder_leaves_methods_out_and_ends_with_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = "run", "--model", target(), "--dtype", "float32", "--quick", "--max-new-tokens", "4"
    result = bench(*quick, "--per-category", "1")
    assert result.exit_code == 0, result.output
    left_out = [line.partition(":")[0] for line in result.stderr.splitlines() if "left out" in line]
    assert left_out == ["eagle3 is left out"] and "auto drafts with longest suffix match" in result.stderr
    out = Path(f"foretell-bench-{target().name}")
    results = BenchResults.model_validate_json((out / "results.json").read_bytes())
    names = [c.name for c in results.competitors]
    assert names == [f"{name}/float32" for name in ("autoregressive", "auto", "sam_recycling", "ngram")]
    assert results.repeats == 1 and all(c.peak_memory_bytes is None for c in results.competitors)
    assert results.competitors[0].pooled.questions == 6
    last = result.stdout.splitlines()[-4:]
    assert last[0].startswith("On this machine use") and "times plain decoding" in last[0]
    assert [Path(line) for line in last[1:]] == [out / name for name in ("report.md", "report.html", "speedup.png")]
    assert not any(meaning in result.stdout for meaning in results.definitions.values())
    assert last[0] in (out / "report.md").read_text()
    # The same command goes on: nothing is overwritten.
    before = (out / RECORDS_FILE).read_text()
    again = bench(*quick, "--per-category", "2", "--methods", "ngram")
    assert "24 answers of an earlier run" in again.stderr and (out / RECORDS_FILE).read_text().startswith(before)


def test_a_run_without_a_folder_is_refused_and_a_method_that_was_named_is_not_left_out(tmp_path: Path) -> None:
    assert "--out" in refused("run", "--model", target())
    named = "run", "--model", target(), "--dtype", "float32", "--quick", "--out", tmp_path / "out"
    assert "no eagle3 speculator" in refused(*named, "--methods", "eagle3")
    assert "no eagle3 speculator" in refused(*named, "--speculative-config", '{"method": "eagle3"}')


def test_a_run_asks_no_question_that_would_end_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions of two seconds each, a limit of five seconds: the third would end after six."""
    clock = [0.0]
    monkeypatch.setattr("foretell.bench.run.time.monotonic", lambda: clock[0])
    questions = in_turns(load_questions("builtin").questions)
    assert [q.id.rpartition("-")[2] for q in questions] == [n for n in "1234" for _ in range(6)]
    asked = list[str]()

    class Timed(BenchRun):
        def _warm_up(self) -> None:
            pass

        def _answer(self, competitor: Any, together: Any, repeat: int, done: object) -> list[QuestionResult]:
            clock[0] += 2
            asked.extend(q.id for q in together)
            return [make_result(q.id, "autoregressive/x", (), repeat=repeat) for q in together]

    settings = BenchSettings(
        model="m", tasks="t", digest="d", max_new_tokens=8, temperature=0, seed=0, threads=1, dtypes=("x",)
    )
    with RunStore(tmp_path, settings, QuestionResult) as store:
        Timed([SimpleNamespace(name="autoregressive/x")], {}, 1).run(questions, store, lambda _: None, 5.0)  # type: ignore[list-item]
        assert asked == ["conversation-1", "translation-1"]
        Timed([SimpleNamespace(name="autoregressive/x")], {}, 1).run(questions, store, lambda _: None, 5.0)  # type: ignore[list-item]
    assert asked == [q.id for q in questions[:4]]


def test_broken_lines_are_named_and_the_rest_measured(questions: Path, tmp_path: Path) -> None:
    questions.write_text(questions.read_text() + '{"turns": 3}\n')
    result = bench(*run(questions, tmp_path / "out"))
    assert result.exit_code == 1
    assert "line 3" in result.stderr and "left out" in result.stderr
    assert (
        BenchResults.model_validate_json((tmp_path / "out" / "results.json").read_bytes())
        .competitors[0]
        .pooled.questions
        == 2
    )


def test_methods_with_options_and_targets_with_options_are_measured(questions: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", '{"method": "ngram", "num_speculative_tokens": 4}'
    given = ("--methods", "autoregressive", "--speculative-config", options, "--kv-cache-policy", "tova@64")
    result = bench(*run(questions, out, *given))
    assert result.exit_code == 0, result.output
    found = BenchResults.model_validate_json((out / "results.json").read_bytes())
    assert found.settings.target.kv_cache_policy == "tova@64"
    names = [c.name.split("/")[0] for c in found.competitors]
    assert names == ["autoregressive", "ngram{num_speculative_tokens=4}"]


def test_memory_is_measured_in_a_process_of_its_own(questions: Path, tmp_path: Path) -> None:
    result = bench(*run(questions, tmp_path / "out", "--methods", "autoregressive", "--memory"))
    assert result.exit_code == 0, result.output
    (found,) = BenchResults.model_validate_json((tmp_path / "out" / "results.json").read_bytes()).competitors
    assert found.peak_memory_bytes is not None and found.peak_memory_bytes > 10_000_000


def test_an_interruption_keeps_finished_work(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BenchRun, "run", stop)
    result = bench(*run(questions, tmp_path / "out"))
    assert result.exit_code == 130 and "give the same command again" in result.stderr
    monkeypatch.undo()
    assert bench(*run(questions, tmp_path / "out")).exit_code == 0


def test_the_draft_model_goes_to_the_methods_that_use_it(questions: Path, tmp_path: Path) -> None:
    result = bench(*run(questions, tmp_path / "out", "--methods", "ngram,draft_model", "--draft-model", str(draft())))
    assert result.exit_code == 0, result.output
    found = f"the draft model {draft()}: used by draft_model; not used by autoregressive, ngram"
    assert found in " ".join(result.stderr.split())


def test_the_schema_is_printed() -> None:
    assert set(json.loads(bench("schema").stdout)["properties"]) == set(BenchResults.model_fields)


def test_settings_may_not_change_in_a_folder(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert bench(*run(questions, out)).exit_code == 0
    assert "another max_new_tokens" in refused(*run(questions, out, "--max-new-tokens", "9"))


def test_two_runs_into_one_folder_are_refused(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = BenchSettings(
        model="m", tasks="t", digest="d", max_new_tokens=8, temperature=0, seed=0, threads=1, dtypes=("float32",)
    )
    with RunStore(out, settings, QuestionResult):
        assert "another run is writing" in refused(*run(questions, out))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--methods", "ngramm"), "did you mean 'ngram'"),
        (("--peers", "transformer"), "did you mean 'transformers'"),
        (("--peers", "llamacpp"), "did you mean 'xllamacpp'"),
        (("--categories", "qaa"), "did you mean 'qa'"),
        (("--dtype", "floot32"), "did you mean 'float32'"),
        (("--methods", "draft_model"), "needs a draft model"),
        (("--draft-model", str(draft())), "no effect: autoregressive, ngram, suffix@4 do not draft with it"),
        (
            ("--methods", "layer_skip", "--reference", __file__),
            "would have no effect: autoregressive, layer_skip",
        ),
        (
            ("--speculative-config", json.dumps({"method": "suffix", "model": str(draft())})),
            "would have no effect: suffix{model=draft} does not draft with it",
        ),
        (("--peers", "transformers", "--temperature", "1"), "temperature 0 only"),
        (("--peers", "transformers-assisted"), "needs a draft model"),
        (("--threads", "99999"), "threads must lie between 1 and"),
        (("--threads", "0"), "threads must lie between 1 and"),
        (("--sparsity", "nowhere"), "nowhere"),
        (("--kv-cache-policy", "tova@64", "--peers", "transformers"), "peers run the model as it is"),
        (("--speculative-config", '{"eagle_topk": 2}'), 'names no method: add "method"'),
        (("--speculative-config", '{"method": "ngram", "eagle_topk": 2}'), "eagle_topk"),
    ],
)
def test_wrong_options_are_one_sentence(questions: Path, tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    assert words in refused(*run(questions, tmp_path / "out", *more))


def test_a_missing_peer_names_the_pip_command(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "llama_cpp":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'foretell[peers]'" in refused(*run(questions, tmp_path / "out", "--peers", "llama.cpp"))


def test_record_replay_and_pin(questions: Path, tmp_path: Path) -> None:
    out, pin = tmp_path / "recording", tmp_path / "pin.json"
    made = bench(
        "record", "--tasks", questions, "--out", out, "--model", target(), "--dtype", "float32", "--max-new-tokens", 8
    )
    assert made.exit_code == 0, made.output
    assert bench("replay", out, "--methods", "ngram", "--pin", pin, "--out", tmp_path / "results").exit_code == 0
    assert "as pinned" in bench("replay", out, "--check", pin).stdout
    assert (tmp_path / "results" / "results.json").is_file()
    assert "holds no run" in refused("replay", tmp_path)


def test_a_step_is_timed_with_ratios(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    sizes = ["--tokens", "1,2", "--context", "16", "--repeats", "2", "--rows", "1,2", "--dtype", "float32,bfloat16"]
    result = bench("step", "--model", target(), *sizes, "--json", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert {(p["competitor"], p["tokens"]) for p in report["passes"]} >= {
        ("foretell float32", 1),
        ("foretell bfloat16 tree", 2),
    }
    assert all(len(p["samples_ms"]) == 2 and p["median_ms"] > 0 for p in report["passes"])
    assert any("outside the target pass" in f["name"] for f in report["ratio_goals"])
    assert "whole numbers" in refused("step", "--model", target(), "--tokens", "1,x")


def test_a_step_prints_json_in_place_of_tables() -> None:
    sizes = ["--tokens", "1", "--context", "16", "--repeats", "1", "--no-engine", "--dtype", "float32"]
    report = json.loads(bench("step", "--model", target(), *sizes, "--json", "-").stdout)
    assert {p["competitor"] for p in report["passes"]} >= {"foretell float32"}


TOY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
}


def test_a_random_model_of_a_shape_is_timed_against_the_memory_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"toy": {"source": "owner/toy", **TOY}}
    monkeypatch.setattr("foretell.roofline.model_configs.builtin_models", lambda: models)
    out = tmp_path / "step.json"
    sizes = ["--tokens", "1,4", "--context", "16", "--repeats", "1", "--rows", "2", "--dtype", "float32"]
    result = bench("step", "--shape", "toy", *sizes, "--json", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["bandwidth"] > 1e8 and "GB/s" in result.stdout
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 300 * 64
    for p in report["passes"]:
        cache = 4 * 2 * 2 * 32 * (16 + 2 * p["tokens"])
        assert p["bytes"] == pytest.approx(4 * matrices + cache, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "lama-2-7b"), "did you mean llama-2-7b"),
        (("--shape", "opt-125m"), "the decoder does not run opt"),
        (("--shape", "llama-68m", "--dtype", "int9"), "did you mean 'int8'"),
        (("--device", "tpu"), "unknown device"),
        (("--device", "cuda", "--peers", "transformers"), "on the CPU only"),
        (("--peers", "openvino"), "unknown peer of single passes 'openvino'; known: llama.cpp, transformers"),
    ],
)
def test_wrong_shapes_and_devices_are_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("step", *arguments)


def test_the_built_in_questions_are_the_default() -> None:
    assert len(load_questions("builtin").questions) == 24
