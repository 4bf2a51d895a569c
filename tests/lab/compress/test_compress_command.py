"""`foretell compress` from end to end, on a small random model."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from command import expect_error, run_foretell, save_tiny_model
from foretell.lab.compress import METHODS, PRUNING
from foretell.lab.compress.low_rank import SVD
from foretell.lab.compress.sparsity import Sparsity
from foretell.lab.quantize import calibration
from foretell.lab.quantize.base import linears, matrices
from foretell.lab.quantize.evaluate import compare
from foretell.load import load, open_checkpoint
from foretell.model.block.decoder import decoder_rope_tables
from foretell.model.load.build import build_block
from helpers import chain_tree, random_tokens
from vision import vision_model

AMOUNT = {
    **dict.fromkeys(("magnitude", "wanda", "sparsegpt"), ("--pattern", "2:4")),
    **dict.fromkeys(("svd", "asvd", "svd_llm"), ("--rank-share", "0.5")),
    "shortgpt": ("--sparsity", "0.25"),
    "slicegpt": ("--sparsity", "0.5"),
    "laser": ("--rank-share", "0.25"),
    "llm_pruner": ("--sparsity", "0.25"),
}


@cache
def model() -> Path:
    return save_tiny_model(Path(mkdtemp()) / "model", layers=4)


@cache
def text() -> Path:
    path = Path(mkdtemp()) / "text.jsonl"
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 5)) for _ in range(40)]
    path.write_text("\n".join(json.dumps({"text": " ".join(random.choice(words, 90))}) for _ in range(12)))
    return path


def arguments(out: Path, method: str, *more: str) -> list[str | Path]:
    sizes = ("--calibration-tokens", "2048", "--held-back-tokens", "1024")
    return ["compress", model(), "--out", out, "--method", method, "--text", text(), *sizes, *more]


def compress(out: Path, method: str, *more: str) -> dict[str, object]:
    result = run_foretell(*arguments(out, method, *(more or AMOUNT[method])), "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert not [p for p in out.parent.iterdir() if p.name.startswith(".")]
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_with_a_card_is_written_and_loads(method: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = compress(out, method)
    card = json.loads((out / "compression.json").read_text())
    assert card.items() <= found.items() and card["method"] == method and card["source"] == str(model())
    assert card["comparison_text"] == str(text()) and card["calibration_tokens"] == (
        0 if method in ("magnitude", "svd") else 2048
    )
    assert f"| Method | {method}, {card['amount']} |" in (out / "README.md").read_text()
    before, after = (open_checkpoint(path) for path in (model(), out))
    assert after.config.layers == len(card["blocks"]) == (3 if method == "shortgpt" else 4)
    tokens = torch.from_numpy(np.array(random_tokens(40, 257)))[None]
    assert 0 < compare(before[:2], after[:2], tokens).kl < 2
    assert card["comparison"]["perplexity"] != card["comparison"]["quantized_perplexity"]
    old, new = load(str(model())), load(str(out))
    assert new.tokens("Hello") == old.tokens("Hello") and new.eos == old.eos
    assert card["zeros"] == (0.5 if "2:4" in AMOUNT[method] else pytest.approx(0, abs=1e-3))


def test_transformers_reads_the_numbers_that_foretell_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for method in ("wanda", "shortgpt"):
        compress(tmp_path / method, method)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / method, dtype=torch.float32)
        tokens = random_tokens(20, 257)
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0]
        found = load(str(tmp_path / method), "float32").runner().forward([0], chain_tree(tokens)).logits
        torch.testing.assert_close(found.reshape(20, -1), expected, rtol=1e-3, atol=1e-4)


def refuse_elsewhere(path: Path) -> None:
    """What other programs cannot run as it is meant, they do not run."""
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="foretell_compressed"):
        transformers.AutoModelForCausalLM.from_pretrained(path)


def test_low_rank_is_stored_as_factors_where_these_are_smaller(tmp_path: Path) -> None:
    found = compress(tmp_path / "thin", "svd", "--rank-share", "0.4")
    assert found["ranks"] == {"qkv": 6, "output": 6, "gate_up": 6, "down": 6}
    refuse_elsewhere(tmp_path / "thin")
    tensors = load_file(tmp_path / "thin" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.qkv_v_proj.weight"].shape == (6, 16)
    assert "model.layers.0.self_attn.q_proj.weight" not in tensors
    config, weights, _, _ = open_checkpoint(tmp_path / "thin")
    opened = build_block(config, 1, weights, torch.float32, torch.device("cpu"))
    dense, tensors_of_source, _, _ = open_checkpoint(model())
    source = build_block(dense, 1, tensors_of_source, torch.float32, torch.device("cpu"))
    for role, linear in linears(source).items():
        wanted = SVD(0.4).compress(linear.weight.data, None)
        torch.testing.assert_close(matrices(opened)[role].weight, wanted, rtol=1e-4, atol=1e-5)
    partly = compress(tmp_path / "partly", "svd", "--rank-share", "0.6")
    assert partly["ranks"] == {"qkv": 10, "gate_up": 10}
    said = json.loads((tmp_path / "partly" / "config.json").read_text())
    assert said["low_rank"] == partly["ranks"] and said["compressed_model_type"] == "llama"
    text = (tmp_path / "partly" / "README.md").read_text()
    assert "no smaller than output, down, which run dense" in text
    assert compress(tmp_path / "whole", "svd", "--rank-share", "1")["ranks"] == {}
    assert "It runs dense, as fast as the source" in (tmp_path / "whole" / "README.md").read_text()
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["model_type"] == "llama"


def zeros_by_block(path: Path) -> list[float]:
    tensors = load_file(path / "model.safetensors")
    blocks = [[t for name, t in tensors.items() if f".{i}." in name and "_proj" in name] for i in range(4)]
    return [sum(int((t == 0).sum()) for t in block) / sum(t.numel() for t in block) for block in blocks]


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_owl_prunes_blocks_unequally_and_keeps_the_share(method: str, tmp_path: Path) -> None:
    found = compress(tmp_path / "out", method, "--sparsity", "0.5", "--allocation", "owl")
    assert found["amount"] == "sparsity 0.5, shared out by owl" and found["calibration_tokens"] == 2048
    zeros = zeros_by_block(tmp_path / "out")
    assert sum(zeros) / 4 == pytest.approx(0.5, abs=0.02) and 0.1 < max(zeros) - min(zeros) < 0.22


def narrow_model(path: Path) -> Path:
    """A model whose residual stream lies in 8 of its 16 dimensions."""
    made = save_tiny_model(path, layers=4)
    tensors = load_file(made / "model.safetensors")
    axes = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1))).Q[:, :8]
    inside = axes @ axes.T
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] @ inside
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = inside @ tensors[name]
    save_file(tensors, made / "model.safetensors")
    return made


def test_slicegpt_changes_nothing_without_a_cut_and_where_the_stream_has_no_more_dimensions(tmp_path: Path) -> None:
    tokens = torch.from_numpy(np.array(random_tokens(40, 257)))[None]
    narrow = narrow_model(tmp_path / "narrow")
    for source, sparsity in ((model(), "0"), (narrow, "0.5")):
        given = arguments(tmp_path / sparsity, "slicegpt", "--sparsity", sparsity)
        given[1] = source
        result = run_foretell(*given)
        assert result.exit_code == 0, result.output
        before, after = open_checkpoint(source), open_checkpoint(tmp_path / sparsity)
        assert after.config.hidden == (16 if sparsity == "0" else 8) and after.config.shortcuts
        assert compare(before[:2], after[:2], tokens).kl < 1e-6
        logits = [load(str(p), "float32").runner().forward([0], chain_tree(tokens[0].tolist())).logits
                  for p in (source, tmp_path / sparsity)]  # fmt: skip
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    refuse_elsewhere(tmp_path / "0.5")
    assert "a model that is sliced already cannot be compressed" in expect_error(
        "compress", tmp_path / "0.5", "--out", tmp_path / "new", "--method", "svd", "--rank-share", "0.5"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"low_rank": None}, "neither low_rank nor shortcuts says of which kind"),
        ({"compressed_model_type": None}, "has no compressed_model_type"),
        ({"low_rank": {"qkw": 6}}, "qkw"),
        ({"low_rank": {"qkv": 0}}, "qkv"),
        ({"low_rank": {"qkv": 7, "output": 6, "gate_up": 6, "down": 6}}, "q_u_proj.weight has shape"),
    ],
)
def test_a_compressed_checkpoint_that_is_not_described_is_refused(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    shutil.copytree(thin(), tmp_path / "thin")
    file = tmp_path / "thin" / "config.json"
    raw = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    assert said in expect_error("generate", "a", "--model", tmp_path / "thin", "--max-new-tokens", "2")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (None, "a compressed model (svd) without its compression.json"),
        ("{", "compression.json: "),
        ("{}", "no method is named, so it is unknown what was done"),
        ('{"method": "wanda"}', "says wanda, and config.json beside it svd"),
    ],
)
def test_a_compressed_checkpoint_without_its_kind_is_refused(card: str | None, said: str, tmp_path: Path) -> None:
    shutil.copytree(thin(), tmp_path / "thin")
    file = tmp_path / "thin" / "compression.json"
    file.unlink()
    if card is not None:
        file.write_text(card)
    assert said in expect_error("generate", "a", "--model", tmp_path / "thin", "--max-new-tokens", "2")


def test_what_is_made_of_a_compressed_checkpoint_is_a_model_of_its_own(tmp_path: Path) -> None:
    compress(tmp_path / "pruned", "magnitude", "--pattern", "2:4")
    out = tmp_path / "nested"
    made = run_foretell("train", "matformer", tmp_path / "pruned", "--out", out, "--text", text())
    assert made.exit_code == 0, made.output
    assert "foretell_compression" in json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert "foretell_compression" not in json.loads((out / "config.json").read_text())
    assert run_foretell("generate", "a", "--model", out, "--max-new-tokens", "2").exit_code == 0


@cache
def thin() -> Path:
    out = Path(mkdtemp()) / "thin"
    compress(out, "svd", "--rank-share", "0.4")
    return out


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_the_same_weights_go_whatever_the_number_of_threads(method: str) -> None:
    config, weights, _, _ = open_checkpoint(model())
    x, masks = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0)), []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        block = build_block(config, 0, weights, torch.float32, torch.device("cpu"))
        inputs = calibration.collect(config, decoder_rope_tables(config), 0, block, x)
        chosen = PRUNING[method](Sparsity(0.5))
        masks.append([chosen.compress(m.weight.data, inputs[role]) == 0 for role, m in linears(block).items()])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


def test_shortgpt_leaves_out_the_block_that_does_nothing(tmp_path: Path) -> None:
    idle = save_tiny_model(tmp_path / "idle", layers=4)
    tensors = load_file(idle / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"].zero_()
    save_file(tensors, idle / "model.safetensors")
    given = arguments(tmp_path / "out", "shortgpt", "--sparsity", "0.25", "--json")
    given[1] = idle
    found = json.loads(run_foretell(*given).stdout)
    assert found["blocks"] == [0, 1, 3] and found["comparison"]["kl"] < 1e-9


def test_laser_changes_one_late_matrix_to_the_least_loss_on_the_text(tmp_path: Path) -> None:
    amounts = {
        share: str(compress(tmp_path / share, "laser", "--rank-share", share)["amount"]) for share in ("0.1", "1")
    }
    searched = str(compress(tmp_path / "best", "laser")["amount"])

    def loss(amount: str) -> float:
        return float(amount.split("text ")[1].split(",")[0])

    assert loss(searched) <= loss(amounts["0.1"]) and "before" in searched
    before = float(searched.split("before ")[1].rstrip(")"))
    assert loss(amounts["1"]) == pytest.approx(before, abs=1e-3), "the full rank changes nothing"
    old, new = (load_file(path / "model.safetensors") for path in (model(), tmp_path / "best"))
    changed = {name for name in old if (old[name] - new[name].float()).abs().max() > 1e-5}
    assert len({name.split(".mlp.")[0] for name in changed}) == 1
    assert all("mlp" in name and int(name.split(".")[2]) >= 3 for name in changed), changed
    text = torch.from_numpy(np.array(random_tokens(60, 257)))[None]
    assert compare(open_checkpoint(model())[:2], open_checkpoint(tmp_path / "best")[:2], text).kl < 1


def test_an_interrupted_run_goes_on_and_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compress(tmp_path / "whole", "sparsegpt")
    started = list[int]()

    def interrupt_at(block: int) -> None:
        def collect(config, ropes, i, *rest):  # type: ignore[no-untyped-def]
            if i == block:
                raise KeyboardInterrupt
            started.append(i)
            return calibration.collect(config, ropes, i, *rest)

        monkeypatch.setattr("foretell.lab.compress.job.collect", collect)

    interrupt_at(2)
    run_foretell(*arguments(tmp_path / "out", "sparsegpt", *AMOUNT["sparsegpt"]))
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.compress").is_dir()
    interrupt_at(-1)
    compress(tmp_path / "out", "sparsegpt")
    assert started == [0, 1, 2, 3]
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert same[0] == same[1]
    interrupt_at(1)
    run_foretell(*arguments(tmp_path / "other", "wanda", "--sparsity", "0.5"))
    interrupt_at(-1)
    started.clear()
    compress(tmp_path / "other", "wanda", "--sparsity", "0.25")
    assert started == [0, 1, 2, 3], "the work of another job is not continued"


def test_what_was_measured_is_kept_when_a_run_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--sparsity", "0.5", "--allocation", "owl")
    compress(tmp_path / "whole", "wanda", *given)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("foretell.lab.compress.job.collect", interrupt)
        run_foretell(*arguments(tmp_path / "out", "wanda", *given))
    assert (tmp_path / ".out.compress" / "outliers.json").is_file() and not (tmp_path / "out").exists()
    monkeypatch.setattr("foretell.lab.compress.job.measure_blocks", interrupt)
    compress(tmp_path / "out", "wanda", *given)
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    "method", ["svd", *(pytest.param(m, marks=pytest.mark.exhaustive) for m in ("wanda", "slicegpt"))]
)
def test_the_answer_of_its_source_stays_the_same_when_it_drafts(method: str, tmp_path: Path) -> None:
    compress(tmp_path / "out", method)
    answers = []
    drafting: list[str | Path] = ["--method", "draft_model", "--draft-model", tmp_path / "out"]
    for more in ([], drafting):
        result = run_foretell("generate", "abcd", "--model", model(), "--max-new-tokens", "24", "--json", *more)
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout)["text"])
    assert answers[0] == answers[1] and answers[0]


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("wamda", ["--sparsity", "0.5"], "did you mean 'wanda'"),
        ("wanda", [], "--method wanda takes --sparsity or --pattern, found neither"),
        ("wanda", ["--sparsity", "0.5", "--pattern", "2:4"], "found --sparsity and --pattern"),
        ("wanda", ["--rank-share", "0.5"], "takes --sparsity or --pattern, found --rank-share"),
        ("laser", ["--sparsity", "0.5"], "--method laser takes --rank-share, found --sparsity"),
        ("laser", ["--rank-share", "2"], "--rank-share 2: the share of the rank"),
        ("svd", ["--sparsity", "0.5"], "--method svd takes --rank-share, found --sparsity"),
        ("wanda", ["--sparsity", "1.5"], "lies in 0..1, found 1.5"),
        ("wanda", ["--pattern", "4:2"], "--pattern 4:2: name how many of how many weights are kept"),
        ("wanda", ["--pattern", "2:5"], "the 16 inputs of qkv in"),
        ("wanda", ["--sparsity", "0.5", "--bits", "4"], "--bits rounds the weights that sparsegpt keeps"),
        ("sparsegpt", ["--sparsity", "0.5", "--bits", "4"], "are no whole groups of 32, as --bits needs"),
        ("svd", ["--rank-share", "0"], "--rank-share 0: the share of the rank"),
        ("llm_pruner", ["--rank-share", "0.5"], "--method llm_pruner takes --sparsity, found --rank-share"),
        ("llm_pruner", ["--sparsity", "0"], "the latter in steps of 1 of 24, and keeps some of both"),
        ("wanda", ["--sparsity", "0.5", "--allocation", "oul"], "did you mean 'owl'"),
        ("svd", ["--rank-share", "0.5", "--allocation", "owl"], "owl is for --method magnitude, wanda, sparsegpt"),
        ("wanda", ["--pattern", "2:4", "--allocation", "owl"], "takes --sparsity, found --pattern"),
        ("slicegpt", ["--rank-share", "0.5"], "--method slicegpt takes --sparsity, found --rank-share"),
        ("slicegpt", ["--sparsity", "1"], "--sparsity 1: slicegpt deletes a share of the hidden size"),
        ("slicegpt", ["--sparsity", "0.5", "--calibration-tokens", "40000"], "tokens of text were found, and 41,024"),
        ("shortgpt", ["--sparsity", "0.1"], "leaves out 0 of 4 blocks"),
        ("shortgpt", ["--sparsity", "1"], "leaves out 4 of 4 blocks"),
        ("wanda", ["--sparsity", "0.5", "--calibration-tokens", "40000"], "tokens of text were found, and 41,024"),
        ("magnitude", ["--sparsity", "0.5", "--text", "none.txt"], "none.txt"),
    ],
)
def test_bad_input_is_one_sentence(method: str, given: list[str], said: str, tmp_path: Path) -> None:
    assert said in expect_error(*arguments(tmp_path / "out", method, *given))
    assert not list(tmp_path.iterdir())


def test_a_multimodal_model_is_refused_before_the_work(tmp_path: Path) -> None:
    # One line: no block is done, and no text read.
    for command in (
        ("compress", "--method", "wanda", "--sparsity", "0.5"),
        ("quantize", "--type", "Q4_0"),
        ("train", "matformer"),
    ):
        said = expect_error(*command, vision_model("smolvlm"), "--out", tmp_path / "out")
        assert "a multimodal model; give a directory of its language model alone" in said


def test_other_outputs_and_models_are_refused(tmp_path: Path) -> None:
    assert "compress writes a directory" in expect_error(*arguments(tmp_path / "m.gguf", "svd", "--rank-share", "1"))
    compress(tmp_path / "out", "magnitude")
    assert "exists already" in expect_error(*arguments(tmp_path / "out", "magnitude", "--sparsity", "0.5"))
    experts = save_tiny_model(tmp_path / "experts")
    raw = json.loads((experts / "config.json").read_text()) | {"model_type": "mixtral", "num_local_experts": 2}
    (experts / "config.json").write_text(json.dumps(raw))
    tensors = {k: v for k, v in load_file(experts / "model.safetensors").items() if ".mlp." not in k}
    save_file(tensors, experts / "model.safetensors")
    said = expect_error("compress", experts, "--out", tmp_path / "new", "--sparsity", "0.5")
    assert "mixtral with experts cannot be compressed yet" in said
