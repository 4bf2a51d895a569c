"""Vision-language models read images in prompts as transformers does, and draft and verify text behind them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import foretell
from command import expect_error, run_foretell, tiny_target
from foretell.api import Answer, Model
from foretell.core.sampling import SamplingParams
from foretell.model.config.readers.hf import from_hf
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.runner import ReadsImages
from foretell.verify.logits import read_chunk
from vision import FAMILIES, IMAGE, IMAGE_TOKEN, gemma3_model, picture, reference, two_way_model, vision_model

TEXT = "abcabcabcab"
PICTURES = picture(1, 40, 24), picture(2, 8, 16)
"""Of different shapes: Idefics 3 and SmolVLM cut the first into six parts, and read the second whole and in two."""


@cache
def model(family: str = "smolvlm") -> Model:
    return foretell.load(str(vision_model(family)), "float32")


def inputs_of(family: str, pictures: Sequence[Path]) -> Any:
    """What transformers makes of the conversation."""
    _, processor = reference(family)
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": TEXT}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(text=text, images=[Image.open(p) for p in pictures], return_tensors="pt")


def answer(behind: Model, method: str, temperature: float = 0.0) -> Answer:
    sampling = SamplingParams(temperature=temperature, seed=3)
    engine = behind.engine(method)
    (completion,) = engine.complete([behind.request(TEXT, sampling, max_new_tokens=24, ignore_eos=True)])
    return Answer.from_completion(completion, engine)


def logits_of(behind: Model, chunks: Sequence[int]) -> torch.Tensor:
    """Logits of the whole prompt, read in chunks of these sizes and the rest."""
    request, runner = behind.request(TEXT), behind.runner()
    assert isinstance(runner, ReadsImages)
    runner.show(0, request.images)
    out, at = list[torch.Tensor](), 0
    for size in (*chunks, len(request.prompt) - sum(chunks)):
        out.append(read_chunk(runner, list(request.prompt[at : at + size]), size))
        at += size
    return torch.cat(out)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pictures", [PICTURES[:1], PICTURES])
def test_logits_and_text_are_those_of_transformers(family: str, pictures: Sequence[Path]) -> None:
    behind, inputs = model(family).with_images(pictures, TEXT), inputs_of(family, pictures)
    assert behind.tokens(TEXT) == inputs["input_ids"][0].tolist()
    whole, _ = reference(family)
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(behind, ()), whole(**inputs).logits[0], rtol=0, atol=1e-4)
    out = whole.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=-1)
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == list(answer(behind, "autoregressive").tokens)


def test_the_model_is_the_own_decoder_whose_passes_without_images_are_those_of_the_text_model() -> None:
    assert isinstance(model().network, NativeDecoder)
    whole, processor = reference("smolvlm")
    tokens = processor.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    runner = model().runner()
    with torch.inference_mode():
        ours = read_chunk(runner, tokens[0].tolist(), tokens.shape[1])
        torch.testing.assert_close(ours, whole(input_ids=tokens).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "method", "temperature"),
    [
        ("smolvlm", "suffix", 0.0),
        ("smolvlm", "suffix", 1.0),
        ("smolvlm", "recycling", 1.0),
        ("smolvlm", "layer_skip", 0.0),
        ("smolvlm", "early_exit", 0.0),
        ("qwen2_5_vl", "suffix", 1.0),
        ("qwen2_5_vl", "recycling", 0.0),
    ],
)
def test_drafted_text_behind_an_image_is_that_of_plain_decoding(family: str, method: str, temperature: float) -> None:
    behind = model(family).with_images(PICTURES[:1], TEXT)
    plain, drafted = (answer(behind, name, temperature) for name in ("autoregressive", method))
    assert drafted.tokens == plain.tokens and drafted.statistics.drafted > 0
    assert drafted.statistics.target_passes <= plain.statistics.target_passes


def test_prompt_chunks_of_any_size_see_the_same_image() -> None:
    behind = model().with_images(PICTURES, TEXT)
    assert torch.equal(logits_of(behind, ()), logits_of(behind, (3, 9, 1, 14)))
    behind = model("qwen2_5_vl").with_images(PICTURES, TEXT)
    torch.testing.assert_close(logits_of(behind, ()), logits_of(behind, (3, 9, 1, 14)), rtol=0, atol=1e-4)


def test_a_request_beside_others_and_from_the_prefix_cache_reads_its_own_image() -> None:
    one, two = (model().with_images([picture(seed)], TEXT) for seed in (1, 2))
    requests = [
        replace(behind.request(TEXT, max_new_tokens=12, ignore_eos=True), cache_salt="s") for behind in (one, two)
    ]
    text = replace(requests[0], images=None)
    assert list(requests[0].prompt) == list(requests[1].prompt)
    alone = [answer(behind, "autoregressive").tokens[:12] for behind in (one, two)]
    assert alone[0] != alone[1]
    engine = model().engine("suffix", rows=4, prefix_caching=True)
    together = engine.complete([*requests, text])
    assert [c.tokens for c in together[:2]] == alone and together[2].tokens not in alone
    assert all(c.statistics.cached_tokens == 0 for c in together)
    again = engine.complete([requests[1], text, requests[0]])
    assert [c.tokens for c in again] == [alone[1], together[2].tokens, alone[0]]
    assert all(c.statistics.cached_tokens == len(text.prompt) - 1 for c in again)


@pytest.mark.parametrize("method", ["suffix", "layer_skip", "early_exit"])
def test_a_prompt_with_an_image_is_read_beside_a_request_that_drafts(method: str) -> None:
    behind = model().with_images(PICTURES[:1], TEXT)
    engine = model().engine(method, rows=2)
    engine.submit(model().request(TEXT, max_new_tokens=40, ignore_eos=True))
    while not next(iter(engine.statistics.values())).drafted:
        engine.step()
    number = engine.submit(behind.request(TEXT, max_new_tokens=24, ignore_eos=True))
    tokens = [t for update in engine.run() if update.request == number for t in update.tokens]
    assert tokens == list(answer(behind, "autoregressive").tokens)


def test_a_row_of_an_image_is_used_again_for_text() -> None:
    request = model().with_images(PICTURES[:1], TEXT).request(TEXT, max_new_tokens=12, ignore_eos=True)
    text, engine = replace(request, images=None), model().engine(rows=1)
    (alone,) = model().engine(rows=1).complete([text])
    engine.complete([request])
    assert engine.complete([text])[0].tokens == alone.tokens


def test_a_text_that_looks_like_an_image_is_text() -> None:
    behind = model().with_images(PICTURES[:1], f"a{IMAGE}b")
    assert behind.tokens("").count(IMAGE_TOKEN) == model().with_images(PICTURES[:1], "ab").tokens("").count(IMAGE_TOKEN)


def test_a_configuration_of_llava_leaves_out_what_is_llama_s() -> None:
    # config.json of llava-hf/llava-1.5-7b-hf, without its vision encoder.
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    config = from_hf({"model_type": "llava", "image_token_index": 32000, "text_config": text})
    assert (config.architecture, config.layers, config.hidden, config.ffn) == ("llama", 32, 4096, 11008)
    assert (config.heads, config.kv_heads, config.vocab, config.eos, config.tied) == (32, 32, 32064, (2,), False)


@pytest.mark.filterwarnings("ignore:__array__")  # of the image processor
def test_a_model_whose_image_tokens_attend_to_each_other_is_refused() -> None:
    with pytest.raises(ValueError, match="in a way that token trees cannot follow"):
        foretell.load(str(two_way_model()), "float32").with_images([picture(1)], TEXT)


def test_gemma_3_reads_text_as_transformers_does_and_refuses_images() -> None:
    path, tokens = gemma3_model(), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    whole = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    causal = foretell.load(str(path), "float32")
    with torch.inference_mode():
        ours, own = read_chunk(causal.runner(), tokens, len(tokens)), whole(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"reads text only: .*image tokens that attend to later ones.*are not read"):
        causal.with_images([picture(1)], TEXT)


def test_from_the_command_line() -> None:
    result = run_foretell("generate", TEXT, "--model", vision_model("smolvlm"), "--image", PICTURES[0], "--dtype",
                          "float32", "--max-new-tokens", "8", "--ignore-eos", "--json")  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    tokens = answer(model().with_images(PICTURES[:1], TEXT), "autoregressive").tokens[:8]
    assert json.loads(result.stdout)["text"] == model().codec.decode(tokens)


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "note.png"
    text.write_text("no image")
    of_vision = ("generate", TEXT, "--model", vision_model("smolvlm"), "--dtype", "float32", "--image")
    assert "reads text only" in expect_error("generate", TEXT, "--model", tiny_target(), "--image", picture(1))
    assert "not an image" in expect_error(*of_vision, text)
    assert "no such file" in expect_error(*of_vision, tmp_path / "missing.png")
    assert "names 0 places for images" in expect_error(*of_vision, picture(1), "--raw")


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(*shape: int, dtype: Any = np.uint8) -> Any:
    return Image.fromarray(np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (24, 40, *shape), dtype))


PALETTE = noise(3).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
FILES = {
    "transparent": encoded(noise(4), "PNG"),
    "transparent WebP": encoded(noise(4), "WEBP", lossless=True),
    "transparent grey": encoded(noise(4).convert("LA"), "PNG"),
    "transparent colour of a palette": encoded(PALETTE, "PNG", transparency=3),
    "grey": encoded(noise(), "PNG"),
    "bits": encoded(noise().convert("1"), "PNG"),
    "inks": encoded(noise(4).convert("CMYK"), "JPEG"),
    "first of several": encoded(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(90)]),
    "one row": encoded(noise(3).resize((300, 1)), "PNG"),
    "one pixel": encoded(Image.new("RGB", (1, 1), "red"), "PNG"),
}


@pytest.mark.parametrize("family", ["smolvlm", "llava"])
@pytest.mark.parametrize("kind", FILES)
def test_files_of_every_kind_are_read_as_transformers_reads_them(family: str, kind: str) -> None:
    vision, (whole, processor) = model(family).vision, reference(family)
    assert vision is not None
    read = vision.read(FILES[kind])
    image = Image.open(BytesIO(FILES[kind]))
    inputs = processor(text=IMAGE, images=[image], add_special_tokens=False, return_tensors="pt")
    assert list(read.tokens) == inputs.pop("input_ids")[0].tolist()
    del inputs["attention_mask"]
    with torch.inference_mode():
        parts = whole.model.get_image_features(**inputs).pooler_output
    own = torch.cat([part.flatten(0, -2) for part in parts])
    torch.testing.assert_close(read.embeddings, own, rtol=0, atol=1e-4)


def test_greys_of_16_bits_are_those_of_8_bits() -> None:
    # PNG, third edition, 13.12: a sample is scaled by the ratio of the largest ones, 65535 / 255 = 257.
    grey, vision = np.array(noise()), model().vision
    assert vision is not None
    deep = encoded(Image.fromarray(grey.astype(np.uint16) * 257), "PNG")
    assert torch.equal(vision.read(deep).embeddings, vision.read(encoded(Image.fromarray(grey), "PNG")).embeddings)
