"""PARD-2 against its authors' arithmetic over a model of transformers: embeddings plus the projected states of the
target, shifted by one, and those of the last token for the masks; in torch and on the kernels.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from command import tiny_target
from foretell.accept import Match
from foretell.catalogue import BuildContext, build
from foretell.core.sampling import SamplingParams
from foretell.draft import Pard2Drafter, PardDrafter
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.load import load
from foretell.model.config.readers.hf import from_hf
from foretell.model.kernels import available
from foretell.model.load.build import build_decoder
from foretell.model.load.native import load_native
from foretell.model.load.pard2 import load_state_projection
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree
from foretell.speculator.export import export
from foretell.speculator.formats.base import Verifier
from foretell.speculator.network.base import TargetInfo
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.pard import PardRecipe
from helpers import random_tokens, unchecked

VOCAB, MASK, DEPTH, SCALE, LAYERS = 257, 7, 4, 0.3, [-1, -2, 1]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
    "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
WIDTH, DRAFT_WIDTH = 32, 48
kernels = pytest.mark.skipif(not available(), reason="the kernels are not available here")


@cache
def oracle() -> tuple[Any, Any, dict[str, torch.Tensor], Path, Path]:
    """A random target and draft model of transformers, the projection, and the folders of both."""
    torch.manual_seed(0)
    target = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 3}, hidden_size=WIDTH)
    )
    draft = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, hidden_size=DRAFT_WIDTH))
    projection = {"target_proj.weight": 0.3 * torch.randn(DRAFT_WIDTH, 3 * WIDTH)}
    projection |= {"target_proj.bias": torch.randn(DRAFT_WIDTH)}
    folders = Path(mkdtemp(prefix="foretell-target-")), Path(mkdtemp(prefix="foretell-pard2-"))
    for model, folder in zip((target, draft), folders, strict=True):
        model.eval().save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_target() / name, folder)
    more = {"pard_token": MASK, "spd_type": "pard2", "pard2": True, "pard2_scale": SCALE, "pard2_proj_bias": True}
    change(folders[1], **more, pard2_target_layers=LAYERS, pard2_target_dim=3 * WIDTH)
    save_file(projection, folders[1] / "warp_model.safetensors")
    return target, draft, projection, *folders


def change(folder: Path, **more: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))


@torch.no_grad()
def reference(text: list[int]) -> torch.Tensor:
    """Logits of all depths after a text, of whose last token the target has read no states."""
    target, draft, projection, *_ = oracle()
    states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    feature = torch.cat([states[i] for i in LAYERS], -1)[0]
    masks = feature[-1:].expand(DEPTH - 1, -1)
    added = torch.cat((feature, masks)) @ projection["target_proj.weight"].T + projection["target_proj.bias"]
    inputs = draft.get_input_embeddings()(torch.tensor([*text, *[MASK] * (DEPTH - 1)]))
    inputs[1:] += SCALE * added
    logits: torch.Tensor = draft(inputs_embeds=inputs[None]).logits[0, -DEPTH:]
    return logits


class Recording(Pard2Drafter):
    """Notes the logits of every depth by the text before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted: dict[tuple[int, ...], torch.Tensor] = {}

    def _predict(self, context):  # type: ignore[no-untyped-def]
        logits = super()._predict(context)
        active = [i for i, depth in enumerate(context.max_depth.tolist()) if depth]
        for place, i in enumerate(active):
            self.noted[tuple(context.sequences[i].tokens.tolist())] = logits[:, place].clone()
        return logits


def network_of(folder: Path, native: bool) -> Any:
    config, weights = from_hf(json.loads((folder / "config.json").read_text())), SafetensorsWeights(folder)
    if native:
        return load_native(config, weights, "float32")
    return build_decoder(config, weights, torch.float32, torch.device("cpu"))


def test_training_and_export_follow_the_authors_arithmetic(tmp_path: Path) -> None:
    """A draft model cut from the target is unrolled as its export by the transcription of the authors' code."""
    target = oracle()[0]
    model = load(str(oracle()[-2]), "float32")
    about = TargetInfo(name="tiny", hidden=WIDTH, vocab=VOCAB, layers=3)
    assert model.checkpoint is not None
    lent = model.checkpoint.embedding_and_head(torch.float32)
    options = {"layers": "2", "depth": str(DEPTH), "mask_token": str(MASK), "states": "4,1"}
    network = PardRecipe.build(RecipeSetup(about, model.config, lent, model.checkpoint, options=options)).network
    assert network.target_proj is not None
    torch.nn.init.normal_(network.target_proj.weight, std=3.0, generator=torch.Generator().manual_seed(5))
    text = random_tokens(12, VOCAB, seed=8)
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    feature = torch.cat((states[-1], states[1]), -1).detach()
    last = torch.arange(len(text))[None] == len(text) - 1
    anchor, rollout = torch.tensor([[len(text) - 1]]), torch.ones(1, 1, dtype=torch.bool)
    out = network(torch.tensor([text]), anchor, [last, *[rollout] * (DEPTH - 1)], feature)
    ours = torch.cat([network.compute_logits(state) for state in out]).detach()
    export(network, Verifier("target", model.config, model.codec), "hf", tmp_path / "out")
    published = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["pard2_target_layers"] == [-1, 1] and said["pard_token"] == MASK
    projection = load_file(tmp_path / "out" / "warp_model.safetensors")["target_proj.weight"] * said["pard2_scale"]
    inputs = published.get_input_embeddings()(torch.tensor([*text, *[MASK] * (DEPTH - 1)]))
    inputs[1:] += torch.cat((feature[0, :-1], feature[0, -2:-1].expand(DEPTH - 1, -1))) @ projection.T
    theirs = published(inputs_embeds=inputs[None]).logits[0, -DEPTH:].detach()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    again = load_state_projection(tmp_path / "out", WIDTH, 3, WIDTH)
    assert again is not None and again.layers == (4, 1)
    torch.testing.assert_close(again.weight, projection)


@pytest.mark.covering(1)
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=kernels)])
@pytest.mark.parametrize("shape", [DynamicTree(9, 2, 12), Chain(3, draw=False)], ids=str)
def test_logits_are_those_of_the_authors_arithmetic(shape: DynamicTree | Chain, native: bool) -> None:
    """In every step of requests that end, begin and accept paths of all lengths, their prompts read in chunks."""
    *_, target_folder, folder = oracle()
    target, draft = network_of(target_folder, native), network_of(folder, native)
    projection = load_state_projection(folder, DRAFT_WIDTH, 3, WIDTH)
    assert projection is not None and projection.layers == (4, 2, 1)
    drafter = Recording(DecoderRunner(draft), MASK, DEPTH, projection)
    drafter._chunk = 5
    requests = [
        Request(random_tokens(n, VOCAB, seed=n), max_new_tokens=8, sampling_params=SamplingParams(1.0, seed=n))
        for n in (2, 21, 9, 1, 30)
    ]
    plain = build("autoregressive", BuildContext(VOCAB, target))
    with unchecked():
        drafted, expected = (
            [c.tokens for c in Engine(DecoderRunner(target), m, rows=3, chunk=8).complete(requests)]
            for m in (Method(drafter, shape, Match()), plain)
        )
    assert drafted == expected and all(len(t) == 8 for t in drafted) and len(drafter.noted) > 12
    for text, logits in drafter.noted.items():
        torch.testing.assert_close(logits.float(), reference(list(text)), atol=1e-4, rtol=0)


def test_a_published_model_drafts_with_the_states_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Named as a draft model: lossless, also with a shared prefix; without its projection, or for a target of another
    width, it drafts from tokens alone.
    """
    *_, target_folder, folder = oracle()
    monkeypatch.setattr(Budget, "governs", lambda self, bound: False)  # it drafts at any cost
    target, draft = load(str(target_folder), "float32"), load(str(folder), "float32")
    method = target.method("pard", {"num_steps": 3}, drafts=[draft])
    texts = [random_tokens(n, VOCAB, seed=1) for n in (9, 20)]
    requests = [Request(text, max_new_tokens=12) for text in (*texts, texts[1], texts[1][:12])]
    engines = (Engine(target.runner(), m, rows=1, prefix_caching=True) for m in (method, target.method()))
    drafted, plain = ([engine.complete([r])[0] for r in requests] for engine in engines)
    assert [c.tokens for c in drafted] == [c.tokens for c in plain] and method.lossless
    assert isinstance(method.draft, Pard2Drafter) and all(c.statistics.drafted > 0 for c in drafted)
    for width, why in ((4 * WIDTH, "it projects 128 numbers of a target's states"), (3 * WIDTH, "there is no target")):
        copied = Path(shutil.copytree(folder, tmp_path / str(width)))
        change(copied, pard2_target_dim=width)
        (copied / "warp_model.safetensors").unlink()
        alone = target.method("pard", {"num_steps": 3}, drafts=[load(str(copied), "float32")]).draft
        assert type(alone) is PardDrafter and why in caplog.text


@pytest.mark.parametrize("damage", ["pickle", "layers", "shape", "key"])
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, damage: str) -> None:
    folder = Path(shutil.copytree(oracle()[-1], tmp_path / "model"))
    file = folder / "warp_model.safetensors"
    if damage == "pickle":
        file.rename(folder / "warp_model.bin")
    elif damage == "key":
        change(folder, pard2_gate="sigmoid")
    elif damage == "layers":
        change(folder, pard2_target_layers=[-1, -5, 1])
    else:
        save_file(load_file(file) | {"target_proj.weight": torch.zeros(2, 2)}, file)
    words = {
        "pickle": r"warp_model.bin: a pickle, and unpickling can run code; convert it once where you trust it",
        "layers": r"pard2_target_layers should be of 4 states of its target, found \[-1, -5, 1\]",
        "key": r"pard2_gate should be left out: this key is not known here",
        "shape": r"target_proj.weight should be 48 x 96, found \[2, 2\]",
    }
    with pytest.raises(ValueError, match=words[damage]) as error:
        load_state_projection(folder, DRAFT_WIDTH, 3, WIDTH)
    assert "\n" not in str(error.value)
