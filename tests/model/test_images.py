"""A vision-language model drafts and verifies text behind an image."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import foretell
from command import expect_error, run_foretell, tiny_target
from foretell.api import Answer, Model

VOCAB, IMAGE = 64, "<image>"
TEXT = "abcabcabcab"
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


@cache
def vision_model() -> Path:
    """A Llava of a few thousand parameters with its processor: four image tokens per image."""
    folder = Path(mkdtemp()) / "llava"
    letters = {chr(ord(" ") + 65 + i): i for i in range(26)} | {f"<{i}>": i for i in range(26, VOCAB - 1)}
    tokenizer = Tokenizer(models.BPE(vocab=letters | {IMAGE: VOCAB - 1}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.add_special_tokens([IMAGE])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": [IMAGE]})
    fast.image_token, fast.image_token_id = IMAGE, VOCAB - 1
    sizes = {"height": 8, "width": 8}
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=sizes),
        tokenizer=fast, patch_size=4, vision_feature_select_strategy="default", image_token=IMAGE,
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=VOCAB - 2, bos_token_id=None,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        projection_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCAB - 1,
                                      image_seq_length=4, vision_feature_layer=-1)  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@cache
def picture(seed: int) -> Path:
    path = Path(mkdtemp()) / f"{seed}.png"
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)).save(path)
    return path


@cache
def model() -> Model:
    return foretell.load(str(vision_model()), "float32")


def answer(behind: Model, method: str, **values: float) -> Answer:
    sampling = foretell.SamplingParams(temperature=values.get("temperature", 0.0), seed=3)
    engine = behind.engine(method)
    (completion,) = engine.complete([behind.request(TEXT, sampling, max_new_tokens=24, ignore_eos=True)])
    return Answer.from_completion(completion, engine)


@pytest.mark.parametrize("method", ["ngram", "suffix", "recycling", "sam_recycling"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_text_behind_an_image_is_that_of_plain_decoding(method: str, temperature: float) -> None:
    behind = model().with_images([picture(1)], TEXT)
    plain = answer(behind, "autoregressive", temperature=temperature)
    drafted = answer(behind, method, temperature=temperature)
    assert drafted.tokens == plain.tokens and drafted.statistics.drafted > 0
    assert drafted.statistics.target_passes <= plain.statistics.target_passes


def test_the_text_is_what_transformers_generates_and_depends_on_the_image() -> None:
    found = {}
    for seed in (1, 2):
        behind = model().with_images([picture(seed)], TEXT)
        found[seed] = answer(behind, "suffix").tokens
        processor = transformers.AutoProcessor.from_pretrained(vision_model())
        inputs = processor(text=IMAGE + TEXT, images=Image.open(picture(seed)), return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == behind.tokens(TEXT)
        reference = transformers.AutoModelForImageTextToText.from_pretrained(vision_model(), dtype=torch.float32)
        out = reference.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=-1)
        assert out[0, inputs["input_ids"].shape[1] :].tolist() == list(found[seed])
    assert found[1] != found[2]


def test_prompt_chunks_of_any_size_see_the_same_image() -> None:
    behind = model().with_images([picture(1), picture(2)], TEXT)
    tokens, runner = behind.tokens(TEXT), behind.runner()
    assert tokens.count(VOCAB - 1) == 8

    def last(chunks: Sequence[int]) -> torch.Tensor:
        from foretell.verify.logits import read_chunk

        runner.truncate(0, 0)
        at, logits = 0, torch.zeros(0)
        for size in chunks:
            logits = read_chunk(runner, tokens[at : at + size], 1)
            at += size
        assert at == len(tokens)
        return logits

    torch.testing.assert_close(last([len(tokens)]), last([3, 4, len(tokens) - 7]), rtol=1e-4, atol=1e-4)


def test_from_the_command_line() -> None:
    result = run_foretell("generate", TEXT, "--model", vision_model(), "--image", picture(1), "--method", "suffix",
                          "--dtype", "float32", "--max-new-tokens", "8", "--ignore-eos", "--json")  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(result.stdout)["text"] == answer_text(8)


def answer_text(tokens: int) -> str:
    behind = model().with_images([picture(1)], TEXT)
    return behind.codec.decode(answer(behind, "autoregressive").tokens[:tokens])


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "note.png"
    text.write_text("no image")
    of_vision = ("generate", TEXT, "--model", vision_model(), "--dtype", "float32", "--image")
    assert "reads text only" in expect_error("generate", TEXT, "--model", tiny_target(), "--image", picture(1))
    assert "not an image" in expect_error(*of_vision, text)
    assert "no such file" in expect_error(*of_vision, tmp_path / "missing.png")
    assert "cannot read this prompt" in expect_error(*of_vision, picture(1), "--raw")
