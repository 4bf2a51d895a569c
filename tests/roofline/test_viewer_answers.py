"""What the page is answered: the figures of the command line, for every setting of its form."""

import csv
import io
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from foretell.roofline.analysis import AnalyzedModel, analyse
from foretell.roofline.cost import scalar
from foretell.roofline.hardware import known_hardware
from foretell.roofline.model_configs import find_model
from foretell.roofline.offload import apply_offload
from foretell.roofline.report import format_number, format_seconds
from foretell.roofline.viewer.answers import Answers
from foretell.roofline.viewer.page import question_of_link
from foretell.roofline.viewer.settings import Known, SettingError, read_question
from foretell.roofline.workload import LIMITS
from roofline_page import run_cli

ANSWERS = Answers(Known(known_hardware(), {}))
QUESTIONS = (
    "model=llama-2-7b&context=2048&fusion=none&runtime=datasheet",
    "model=llama-3.1-70b&hardware=a100-80g&devices=8&weights=4g128&head=16&runtime=compiled",
    "model=llama-3.1-8b&hardware=h100-sxm&weights=fp8&activations=fp8&head=16&batch=4",
    "model=llama-2-7b&hardware=h100-sxm&batch=32&stage=verify&tokens=9&runtime=eager",
    "model=llama-2-7b&stage=prefill&context=2048&fusion=none&square=true",
    "model=llama-3-70b&hardware=h100-sxm&stage=verify&tokens=64&batch=16&devices=8&weights=fp8&activations=fp8&kv=8",
    "model=mixtral-8x7b&hardware=a100-80g&stage=chat&batch=3&context=700&generate=90&weights=4g128",
    "model=deepseek-v3&hardware=b200&stage=chunked&batch=5&context=3000&chunk=700&devices=8&fusion=full",
    "model=gemma-3-27b&hardware=rtx-5090&context=90000&kv=2g32z&weights=4&activations=4",
    "model=opt-6.7b&hardware=v100&stage=prefill&context=100&weights=3",
    "model=gpt-j-6b&hardware=m1-ultra&stage=verify&tokens=9&batch=2",
    "model=qwen3-30b-a3b&hardware=aim&context=5&bandwidth=500&peak=2&capacity=80",
    "model=qwen3-next-80b-a3b&hardware=h200&stage=chunked&chunk=300&context=700&batch=4&devices=2",
)
SOME_QUESTIONS = [
    pytest.param(q, marks=pytest.mark.exhaustive if number % 3 else ()) for number, q in enumerate(QUESTIONS)
]


def ask(topic: str, link: str, **more: Any) -> dict[str, Any]:
    """The answer to the state of a page's address."""
    return ANSWERS.answer(topic, question_of_link(link, ANSWERS) | more)


def command(state: str) -> list[str]:
    pairs = dict(p.split("=") for p in state.split("&"))
    square = pairs.pop("square", None)
    return [pairs.pop("model"), *[f"--{k}={v}" for k, v in pairs.items()], *(["--square"] if square else [])]


@pytest.mark.parametrize("state", QUESTIONS)
def test_a_pass_is_that_of_the_command_line(state: str) -> None:
    answer, expected = ask("pass", state), run_cli("analyze", *command(state))
    total, memory = expected["total"], expected["memory"]
    assert [figure for figure, _ in answer["headline"]] == [
        format_seconds(total["seconds"]),
        format_number(total["tokens_per_second"]),
        format_number(total["ops"]),
        format_number(total["bytes"], "B"),
    ]
    rows = {label: figure for label, _, figure in answer["totals"]}
    largest = {"largest batch": memory["largest_batch"], "longest context": memory["longest_context"]}
    assert {name: rows[name] for name in largest} == {
        name: "–" if size is None else f"{size:,}" for name, size in largest.items()
    }
    assert ("between devices" in rows) == (total["link"] > 0)
    assert [size for _, size, _ in answer["memory"]["parts"]] == [
        format_number(memory[name], "B") for name in ("weights", "kv", "activations")
    ]
    assert bool(answer["warning"]) == (memory["fits"] is False)
    table = list(csv.DictReader(io.StringIO(answer["csv"])))
    assert [{k: str(v) for k, v in op.items()} for op in expected["operations"]] == table
    assert [line["key"] for line in answer["lines"]] == [f"{r['group']}/{r['operation']}" for r in table]
    shares = [line["share"] for line in answer["lines"]]
    assert sum(shares) == pytest.approx(1)
    for line, op in zip(answer["lines"], expected["operations"], strict=True):
        assert line["bound"] == op["bound"] and line["took"] == format_seconds(op["seconds"])
        assert line["share"] == pytest.approx(op["seconds"] * op["count"] / total["seconds"])


@pytest.mark.parametrize("state", QUESTIONS)
def test_every_operation_is_drawn_once_below_its_inputs(state: str) -> None:
    answer = ask("pass", state)
    drawn = [f"{g['name']}/{name}" for g in answer["groups"] for row in g["rows"] for name in row]
    assert sorted(drawn) == sorted(line["key"] for line in answer["lines"])
    for group in answer["groups"]:
        at = {name: i for i, row in enumerate(group["rows"]) for name in row}
        if not group["title"]:
            continue
        for name in at:
            assert all(source == "x" or at[source] < at[name] for source in group["inputs"][name]), name


PLANS = (
    ("model=llama-3-8b&hardware=a100-80g", ""),
    ("model=mixtral-8x7b&hardware=h100-sxm&batch=4", ""),
    ("model=opt-30b&hardware=l40s&batch=64&devices=1", ""),
    ("model=llama-3-8b&hardware=h100-sxm&batch=8", "accept=0.7&share=0.25&density=0.1"),
    ("model=llama-2-13b&hardware=a100-80g&runtime=eager", "draft=vicuna-7b&nodes=20"),
    ("model=llama-3-70b&hardware=h100-sxm&devices=4&batch=32&weights=fp8&activations=fp8", "chain=4"),
    ("model=qwen3-30b-a3b&hardware=h100-sxm&batch=3&weights=4g128&head=16", "tree=60x5&tau=3.5"),
    ("model=qwen3-next-80b-a3b&hardware=h200&batch=2&devices=2", ""),
)


@pytest.mark.parametrize(("state", "drafts"), PLANS)
def test_the_methods_are_those_of_the_command_line(state: str, drafts: str) -> None:
    answer = ask("methods", f"{state}&{drafts}")
    options = dict(pair.split("=") for pair in drafts.split("&") if pair)
    given = [f"--{'tokens' if name == 'chain' else name}={value}" for name, value in options.items()]
    expected = run_cli("plan", *command(state), *given)
    assert answer["advice"] == expected["advice"]
    usable = [m for m in answer["methods"] if m["usable"]]
    assert [m["name"] for m in answer["methods"]] == [m["name"] for m in usable] + list(expected["unavailable"])
    for mine, row in zip(usable, expected["methods"][:-1], strict=True):
        assert (mine["name"], mine["basis"]) == (row["method"], row["basis"])
        assert (mine["speedup"], mine["low"], mine["high"]) == (row["speedup"], row["low"], row["high"])
        assert mine["text"] == (f"{row['speedup']:.2f}×" if row["depth"] else "no")
        assert f"{row['tokens_per_pass']:.2f} tokens per pass" in mine["why"][0] or not row["depth"]
    assert [(v["title"], v["speedup"]) for v in answer["variants"]] == [
        (v["title"], v["speedup"]) for v in expected["variants"]
    ]


OFFLOADED = (
    ("model=llama-2-70b&hardware=rtx-4090", (1, 0), "ddr", "device"),
    ("model=mixtral-8x7b&hardware=h100-sxm&batch=8&stage=verify", (0.5, 0.25), "nvme", "device"),
    ("model=llama-3-70b&hardware=a6000&stage=chat&generate=40&batch=2", (0.75, 1), "ddr-server", "host"),
)


def resident_at(setting: dict[str, Any]) -> float:
    """Bytes that stay on the device."""
    q = read_question(setting, ANSWERS.known)
    assert q.offload is not None
    return apply_offload(analyse(q.model, q.hardware, q.workload), q.offload).resident


@pytest.mark.parametrize(("state", "parts", "tier", "place"), OFFLOADED)
def test_offloading_is_that_of_the_command_line(state: str, parts: tuple[float, float], tier: str, place: str) -> None:
    weights, kv = parts
    link = f"{state}&offloadWeights={weights}&offloadKv={kv}&tier={tier}&offloadCompute={place}"
    options = (f"--offload=weights={weights},kv={kv}", f"--tier={tier}", f"--offload-compute={place}")
    answer, expected = ask("pass", link), run_cli("analyze", *command(state), *options)["offload"]
    rows = {label: figure for label, _, figure in answer["totals"]}
    assert rows["time"] == answer["headline"][0][0] == format_seconds(expected["seconds"])
    assert rows["fetched"] == format_number(expected["fetched"], "B") and rows["bound by"] == expected["bound"]
    assert rows["largest batch"] == f"{expected['largest_batch']:,}"
    assert sum(line["share"] for line in answer["lines"]) == pytest.approx(1)
    setting = question_of_link(link, ANSWERS)["now"]
    capacity = read_question(setting, ANSWERS.known).hardware.capacity
    assert capacity is not None
    for name, largest in (("batch", expected["largest_batch"]), ("context", expected["longest_context"])):
        # What a context holds is asked of the first token of a chat.
        at = {**setting, **({"generate": 1} if name == "context" else {})}
        for size in (largest, largest + 1) if 0 < largest < LIMITS[name] else ():
            assert (resident_at({**at, name: size}) <= capacity) == (size == largest)
    if "stage" not in state:
        plan, methods = run_cli("plan", *command(state), *options), ask("methods", link)["methods"]
        by_name = {m["name"]: m["speedup"] for m in methods if m["usable"]}
        assert by_name == {m["method"]: m["speedup"] for m in plan["methods"][:-1]}


@pytest.mark.parametrize(
    "link",
    [
        *SOME_QUESTIONS,
        "model=llama-2-70b&hardware=rtx-4090&offloadWeights=0.6&offloadKv=0.5&stage=chat&generate=30",
    ],
)
def test_the_curves_are_the_passes_at_each_size(link: str) -> None:
    curves = ask("sweeps", link)
    setting = question_of_link(link, ANSWERS)["now"]
    for chart, axis in (("bybatch", "batch"), ("bylength", "context"), ("memorybylength", "context")):
        (series,) = curves[chart]["series"]
        for x, y, fits, text in series["points"][:: len(series["points"]) // 4]:
            q = read_question({**setting, axis: x}, ANSWERS.known)
            a = analyse(q.model, q.hardware, q.workload)
            result = apply_offload(a, q.offload) if q.offload else None
            seconds, resident = (result.seconds, result.resident) if result else (a.seconds, scalar(a.memory.total))
            value = {"bybatch": a.tokens / seconds, "bylength": seconds, "memorybylength": resident}[chart]
            assert y == pytest.approx(value, rel=1e-9)
            assert fits == (q.hardware.capacity is None or resident <= q.hardware.capacity)
            assert text.startswith(f"{float(f'{x:.3g}'):,g}: ") and ("does not fit" in text) == (not fits)
        assert curves[chart]["grid"][-1][0] >= max(y for _, y, *_ in series["points"])


def test_the_gain_by_batch_is_that_of_the_curve() -> None:
    expected = run_cli("plan", "llama-3-8b", "--hardware=a100-80g", "--curve", "--method=eagle3")[0]
    (series,) = ask("gain", "hardware=a100-80g", method="eagle3")["gain"]["series"]
    assert {f"b={x:g}": round(y, 4) for x, y, *_ in series["points"]} == {
        k: v for k, v in expected.items() if k.startswith("b=")
    }
    # A given chain is kept at every batch.
    (given,) = ask("gain", "chain=5", method="ngram")["gain"]["series"]
    for x, y, *_ in given["points"][::4]:
        plan = run_cli("plan", "llama-3-8b", "--hardware=a6000", "--method=ngram", "--tokens=5", f"--batch={x:g}")
        assert y == pytest.approx(plan["methods"][0]["speedup"])


PAGE_NAMES = {"rate": "rates", "tokens": "chain"}
"""Settings of the page that have another name than the command line's option."""


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3", {"rate": "2,12", "requests": 60}),
        ("draft_model", {"rate": "0.5", "requests": 50, "draft": "llama-3.2-1b", "tokens": 5}),
        ("medusa", {"rate": "40", "requests": 150, "tree": "20x4", "tau": 2.5}),
        ("ngram", {"rate": "30", "requests": 80, "running": 8, "prompt": 3000, "output": 90}),
    ],
)
def test_the_simulated_load_is_that_of_the_command_line(method: str, options: dict[str, Any]) -> None:
    pairs = "&".join(f"{PAGE_NAMES.get(k, k)}={v}" for k, v in options.items())
    link = f"model=llama-3-8b&hardware=h100-sxm&{pairs}"
    count = len(options["rate"].split(","))
    assert ask("load", link, method=method, count=count - 1) == {"left": 1, "of": count}
    answer = ask("load", link, method=method, count=count)
    expected = run_cli("load", "llama-3-8b", f"--method={method}", *[f"--{k}={v}" for k, v in options.items()])
    for chart, name in (("latency", "mean_latency"), ("goodput", "goodput")):
        drafted, plain = answer[chart]["series"]
        assert [p[:2] for p in drafted["points"]] == [[r["rate"], r[f"drafted_{name}"]] for r in expected]
        assert [p[:2] for p in plain["points"]] == [[r["rate"], r[name]] for r in expected]


def test_one_request_is_drawn_at_its_rate() -> None:
    answer = ask("load", "requests=1&rates=2", method="ngram", count=1)
    assert [p[0] for p in answer["latency"]["series"][0]["points"]] == [2.0]


def test_two_settings_are_compared() -> None:
    answer = ask("pass", "batch=4&compare=1&compare.weights=4g128&compare.batch=4")
    pair = answer["pair"]
    assert [text for text, differs in pair["mine"] if differs] == ["weights 16"]
    assert [text for text, differs in pair["theirs"] if differs] == ["weights 4g128"]
    a, b = (
        run_cli("analyze", "llama-3-8b", "--batch=4"),
        run_cli("analyze", "llama-3-8b", "--batch=4", "--weights=4g128"),
    )
    ratio = b["total"]["seconds"] / a["total"]["seconds"]
    assert pair["ratio"] == f"This setting is {float(f'{ratio:.3g}'):g}× as fast as the compared one."
    assert all(len(row) == 4 for row in answer["totals"])
    roofs = answer["roof"]["roofs"]
    assert len(roofs) == 2 and math.isfinite(roofs[0][0])


@pytest.mark.parametrize(
    ("topic", "state", "field", "message"),
    [
        ("pass", "batch=abc", "batch", "batch must be a whole number, found 'abc'"),
        ("pass", "batch=2.5", "batch", "found '2.5'"),
        ("pass", "batch=", "batch", "it is empty"),
        ("pass", "batch=0", "batch", "batch must lie between 1 and 1048576, found 0"),
        ("pass", "batch=1e300", "batch", "must be a whole number, found '1e300'"),
        ("pass", "batch=nan", "batch", "must be a whole number, found 'nan'"),
        ("pass", "stage=chunked&context=134217728&chunk=1", "chunk", "more than 131072 passes"),
        ("pass", "stage=walk", "stage", "there is no stage called 'walk'"),
        ("pass", "fusion=all", "fusion", "there is no fusion called"),
        ("pass", "weights=17", "weights", "'17' is not a number format"),
        ("pass", "head=x", "head", "'x' is not a number format"),
        ("pass", "model=llama-3-9b", "model", "there is no model called 'llama-3-9b'"),
        ("pass", "model=/etc/passwd", "model", "there is no model called"),
        ("pass", "model=pasted", "config", "not JSON"),
        ("pass", "hardware=a9000", "hardware", "there is no hardware called 'a9000'"),
        ("pass", "runtime=expanding", "runtime", "there is no runtime called"),
        ("pass", "bandwidth=-5", "bandwidth", "bandwidth must be a positive number"),
        ("pass", "devices=5&hardware=h100-sxm", "devices", "cannot share the 32 heads"),
        ("pass", "devices=2&hardware=aim", "devices", "states no link"),
        ("pass", "offloadWeights=2", "offloadWeights", "must lie between 0 and 1"),
        ("pass", "offloadKv=x", "offloadKv", "must be a number, found 'x'"),
        ("pass", "offloadKv=1&tier=tape", "tier", "there is no memory tier"),
        ("pass", "offloadKv=1&tier=nvme&offloadCompute=host", "tier", "no processor is known"),
        ("pass", "offloadKv=1&offloadCompute=moon", "offloadCompute", "not on 'moon'"),
        ("methods", "accept=1.5", "accept", "acceptance must lie between 0 and 1"),
        ("methods", "chain=0", "chain", "a chain must be at least 1, found 0"),
        ("methods", "chain=2000", "chain", "at most 1000 tokens"),
        ("methods", "tree=60", "tree", "looks like 60x6"),
        ("methods", "tree=3x9", "tree", "drafts at least 9 nodes"),
        ("methods", "chain=3&tree=9x3", "tree", "leave out one of them"),
        ("methods", "tau=3", "tau", "give it with a chain or a tree"),
        ("methods", "chain=4&tau=9", "tau", "yields 1 to 5 tokens per pass"),
        ("methods", "nodes=0", "nodes", "1 to 256 nodes, found 0"),
        ("methods", "density=0", "density", "density must lie in (0, 1]"),
        ("methods", "share=1.5", "share", "share of layers must lie in (0, 1]"),
        ("methods", "draft=gpt-5", "draft", "there is no draft model called 'gpt-5'"),
        ("load", "rates=fast", "rates", "takes requests a second, as 1,4,16; found 'fast'"),
        ("load", f"rates={','.join('1' * 13)}", "rates", "give 1 to 12 rates"),
        ("load", "requests=0", "requests", "requests must lie between 1 and 2000, found 0"),
        ("load", "ttft=-1", "ttft", "a limit must be positive"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_used_is_named_in_one_sentence(
    topic: str, state: str, field: str, message: str
) -> None:
    with pytest.raises(SettingError) as error:
        ask(topic, state, method="eagle3", count=1)
    assert error.value.field == field and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "holds the setting `now`"),
        ({"now": 3}, "holds the setting `now`"),
        ({"now": {"bathc": 3}}, "did you mean batch"),
        ({"now": {"batch": [3]}}, "must be a text or a number"),
        ({"now": {}, "compared": 3}, "holds the setting `now`"),
        ({"now": {}, "method": 3}, "names a method by a text"),
        ({"now": {}, "method": "eagle9"}, "there is no method called 'eagle9'"),
    ],
)
def test_what_is_no_question_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ANSWERS.answer("gain", asked)


def test_a_method_that_cannot_be_used_has_no_load() -> None:
    answer = ask("load", "model=gpt-j-6b", method="draft_model", count=1)
    assert answer["left"] == 0 and "choose a draft model" in answer["unavailable"]
    answer = ask("load", "chain=3", method="jacobi", count=1)
    assert "no acceptance by node" in answer["unavailable"]


def test_answers_hold_no_number_that_json_lacks() -> None:
    links = itertools.product(("", "hardware=aim", "context=0"), ("stage=decode", "stage=verify&tokens=1"))
    for first, second in links:
        for topic in ("pass", "sweeps", "methods"):
            answer = ask(topic, f"{first}&{second}")
            assert "nan" not in repr(answer) and "inf," not in repr(answer)


def test_a_given_device_and_a_model_of_ones_own_are_offered() -> None:
    own = replace(known_hardware()["a6000"], name="mine", title="Mine")
    model = AnalyzedModel("tiny", find_model("llama-68m")[1])
    answers = Answers(Known({"mine": own}, {"tiny": model}))
    assert answers.known.defaults()["model"] == "tiny" and answers.known.defaults()["hardware"] == "mine"
    assert answers.answer("pass", {"now": answers.known.defaults()})["name"] == "tiny-decode"
