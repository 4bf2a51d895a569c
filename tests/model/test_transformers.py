"""Models that the decoder does not support run on transformers, with the same engine and methods."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

import foretell
from foretell.accept import Match, Rejection
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.draft import DraftModel, TokenRecycling
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.load import transformers_masks
from foretell.model.load.transformers import HFRunner, load_hf
from foretell.shape import BranchingTree, Chain, DynamicTree, Trie
from foretell.testing import letter_codec
from helpers import chain_tree, oracle_logits, random_tokens, run, statistics_of, tokens_of

VOCAB = 37
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "opt": (
        "OPTConfig",
        {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 48, "word_embed_proj_dim": 32,
         "max_position_embeddings": 64},
    ),
}  # fmt: skip
ENDS = {"bos_token_id": 0, "eos_token_id": 36, "pad_token_id": 0}


def model_of(name: str, seed: int = 0, **values: object) -> Any:
    kind, sizes = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**(sizes | ENDS | {"vocab_size": VOCAB} | values))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.double().eval()


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_tree_logits_are_path_logits(name: str) -> None:
    model = model_of(name)
    runner, text = HFRunner(model), random_tokens(9, VOCAB)
    runner.forward([3], chain_tree(text[:4]))
    runner.commit(3, range(4))
    runner.forward([3], chain_tree(text[4:]))
    runner.commit(3, range(5))
    tokens, parents = random_tokens(8, VOCAB, seed=2), [-1, 0, 0, 1, 1, 2, 5, 3]
    tree = tree_from_lists([tokens], [parents])
    output = runner.forward([3], tree, hidden_layers=(0, 1, 3))
    for node in range(8):
        path = [*text, *(tokens[i] for i in tree.ancestors(0, node))]
        torch.testing.assert_close(output.logits[node], oracle_logits(model, path)[-1], rtol=0, atol=1e-6)
        states = model(torch.tensor([path]), output_hidden_states=True).hidden_states
        for feature, state in zip(output.hidden_states, states, strict=True):
            torch.testing.assert_close(feature[node], state[0, -1], rtol=0, atol=1e-6)
    runner.commit(3, [0, 2, 5])
    last = runner.forward([3], chain_tree([1])).logits[0]
    torch.testing.assert_close(
        last, oracle_logits(model, [*text, tokens[0], tokens[2], tokens[5], 1])[-1], rtol=0, atol=1e-6
    )


@every_model
def test_methods_give_the_models_own_greedy_text(name: str) -> None:
    model = model_of(name)
    prompts = [random_tokens(n, VOCAB, seed=n) for n in (3, 11, 6)]
    with torch.no_grad():
        own = [
            model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=20)[
                0, len(p) :
            ].tolist()
            for p in prompts
        ]
    methods: list[AnyMethod] = [
        Method(TokenRecycling(VOCAB), Trie(9), Match()),
        Method(DraftModel(HFRunner(model_of(name, seed=1))), Chain(4), Rejection()),
        Method(DraftModel(HFRunner(model_of(name, seed=1))), BranchingTree((2, 2)), Rejection()),
        Method(DraftModel(HFRunner(model)), DynamicTree(3, 2, 6), Match()),
    ]
    for method in methods:
        engine = Engine(HFRunner(model), method, rows=2, chunk=5)
        updates = run(engine, [Request(p, max_new_tokens=20, eos=(36,)) for p in prompts])
        assert [tokens_of(u) for u in updates] == own
    assert statistics_of(updates[0]).tokens_per_pass > 2


@every_model
def test_sampled_text_is_that_of_plain_decoding(name: str) -> None:
    model, texts = model_of(name), []
    requests = [
        Request(random_tokens(5, VOCAB), SamplingParams(temperature=1.0, seed=s), max_new_tokens=15) for s in range(3)
    ]
    for method in (Method(TokenRecycling(VOCAB), Trie(9), Match()), Method(TokenRecycling(VOCAB), Trie(0), Match())):
        texts.append([tokens_of(u) for u in run(Engine(HFRunner(model), method, rows=3), requests)])
    assert texts[0] == texts[1]


def test_a_model_in_a_directory_is_loaded_and_proven(tmp_path: Path) -> None:
    model_of("gpt2").float().save_pretrained(tmp_path)
    model = load_hf(tmp_path, torch.float32, torch.device("cpu"))
    assert HFRunner(model).config.layers == 2
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="transformers cannot load this model"):
        load_hf(tmp_path, torch.float32, torch.device("cpu"))


@every_model
def test_a_missing_weight_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model_of(name).float().save_pretrained(tmp_path)
    load_hf(tmp_path, torch.float32, torch.device("cpu"))
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(key for key in tensors if "fc" in key and key.endswith("weight"))
    save_file({key: t for key, t in tensors.items() if key != gone}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"has no {gone}.*random numbers"):
        load_hf(tmp_path, torch.float32, torch.device("cpu"))


@pytest.mark.filterwarnings("error")
def test_a_weight_of_another_shape_is_named_without_further_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model_of("opt").float().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"ffn_dim": 56}))
    capfd.readouterr()
    with pytest.raises(ValueError, match=r"layers.0.fc1.bias has shape \(48,\), the configuration asks for \(56,\)"):
        load_hf(tmp_path, torch.float32, torch.device("cpu"))
    assert capfd.readouterr() == ("", "")


def test_more_layers_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OlmoConfig(**sizes, **ENDS, vocab_size=VOCAB, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    letter_codec(VOCAB).tokenizer.save(str(tmp_path / "tokenizer.json"))
    foretell.load(str(tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="says that there are 1 layers, and the weights have a layer 1"):
        foretell.load(str(tmp_path))


@pytest.mark.parametrize("key", ["n_layer", "n_head", "n_embd", "vocab_size", "n_positions"])
def test_a_configuration_that_does_not_fit_is_one_sentence(key: str, tmp_path: Path) -> None:
    model_of("gpt2").float().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    hostile: tuple[Any, ...] = ([], "x", 0, -1, None, {"a": 1}, 3)
    for value in hostile:
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
        try:
            load_hf(tmp_path, torch.float32, torch.device("cpu"))
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("kind", ["BloomConfig", "MambaConfig"])
def test_a_model_that_cannot_read_trees_is_refused(kind: str) -> None:
    config = getattr(transformers, kind)(vocab_size=VOCAB, hidden_size=16, n_head=2, n_layer=1, num_hidden_layers=1)
    with pytest.raises(ValueError, match="cannot read token trees"):
        HFRunner(transformers.AutoModelForCausalLM.from_config(config))


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
WINDOWS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "one window": ("Phi3Config", {"sliding_window": 5}),
    "one window, too": ("Starcoder2Config", {"sliding_window": 5}),
    "experts": ("MixtralConfig", {"sliding_window": 5, "num_local_experts": 4}),
    "switched off": ("Qwen2Config", {"use_sliding_window": False, "sliding_window": 5}),
    "of some layers": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "a pattern": ("Gemma3TextConfig", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "types": ("Olmo3Config", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "chunks": ("Llama4TextConfig", {"attention_chunk_size": 5, "num_local_experts": 2, "intermediate_size_mlp": 48}),
    "another name": ("ModernBertDecoderConfig", {"local_attention": 10, "global_attn_every_n_layers": 2}),
    "none": ("Phi3Config", {"sliding_window": None}),
}


def windowed(kind: str, values: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **ENDS, "cls_token_id": 0, "sep_token_id": 0, **values})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return (model if kind == "MixtralConfig" else model.double()).eval()


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_the_model_itself(name: str, tmp_path: Path) -> None:
    """However the configuration says them; beyond the window, in chunks, and in trees."""
    model, text = windowed(*WINDOWS[name]), random_tokens(30, VOCAB)
    runner, logits = HFRunner(model), list[torch.Tensor]()
    for begin, end in ((0, 11), (11, 12), (12, 30)):
        logits.append(runner.forward([3], chain_tree(text[begin:end])).logits)
        runner.commit(3, range(end - begin))
    torch.testing.assert_close(torch.cat(logits).double(), oracle_logits(model, text).double(), rtol=0, atol=1e-4)
    tokens, parents = random_tokens(9, VOCAB, seed=2), [-1, 0, 0, 1, 1, 2, 5, 6, 7]
    found = runner.forward([3], tree_from_lists([tokens], [parents])).logits
    tree = tree_from_lists([tokens], [parents])
    for node in range(9):
        path = [*text, *(tokens[i] for i in tree.ancestors(0, node))]
        torch.testing.assert_close(found[node].double(), oracle_logits(model, path)[-1].double(), rtol=0, atol=1e-4)
    model.float().save_pretrained(tmp_path)
    load_hf(tmp_path, torch.float32, torch.device("cpu"))


def test_windows_that_no_mask_tells_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"attention_types": [[["global", "local"], 2]], "window_size": 5, "num_layers": 4, "num_heads": 4}
    with pytest.raises(ValueError, match="local attention counts places of the cache"):
        HFRunner(windowed("GPTNeoConfig", local))
    windowed("Phi3Config", {"sliding_window": 5}).float().save_pretrained(tmp_path)
    monkeypatch.setattr(transformers_masks, "_made_kinds", lambda model: frozenset(("full_attention",)))
    with pytest.raises(ValueError, match=r"see parts of the text \(sliding_window\) that its masks do not tell"):
        load_hf(tmp_path, torch.float32, torch.device("cpu"))


def test_the_output_before_the_final_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="before the final norm"):
        HFRunner(model_of("gpt2")).forward([0], chain_tree([1]), hidden_layers=(2,))


def test_without_transformers_the_cure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install foretell\[hf\]"):
        load_hf(tmp_path, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with letters as tokens, in the format of a hub model."""
    path = tmp_path_factory.mktemp("gpt2")
    model_of("gpt2").float().save_pretrained(path)
    vocabulary = {chr(ord("A") + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_an_unknown_architecture_generates_with_every_kind_of_method(directory: Path) -> None:
    model = foretell.load(str(directory), dtype="float32")
    plain = model.generate("CABBAGE", max_new_tokens=12)[0]
    assert plain.statistics.new_tokens == 12
    for method in ("recycling", "ngram", "sam_recycling"):
        assert model.generate("CABBAGE", method=method, max_new_tokens=12)[0].text == plain.text
    drafted = model.generate("CABBAGE", model.method("draft_model", drafts=[model]), max_new_tokens=12)[0]
    assert drafted.text == plain.text
    assert drafted.statistics.tokens_per_pass > 3


def test_what_needs_the_own_decoder_says_so(directory: Path) -> None:
    model = foretell.load(str(directory), dtype="float32")
    with pytest.raises(ValueError, match="own decoder"):
        model.method("layer_skip")
    with pytest.raises(ValueError, match="own decoder, and transformers runs 'gpt2'"):
        model.network  # noqa: B018
    with pytest.raises(ValueError, match="int8 is for the own decoder"):
        foretell.load(str(directory), dtype="int8")
