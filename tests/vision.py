"""Vision-language models of a few thousand parameters that transformers writes, and pictures for them."""

import json
from base64 import b64encode
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IMAGE, FAKE, END = "<image>", "<fake_token_around_image>", "<end_of_utterance>"
_TAGS = ("<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)))
SPECIAL = (*_TAGS, FAKE, END, IMAGE)
LETTERS = "abcdefghijklmnopqrstuvwxyz\n:? UA"
VOCAB = 64
IMAGE_TOKEN = VOCAB - 1
_VIDEO_TOKEN = VOCAB - 3
PARTS = (
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
)
TEMPLATE = "{% for m in messages %}U:" + PARTS + "\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
"""As those of published models, it reads parts alone, not strings."""
FAMILIES = ("llava", "llava of stablelm", "idefics3", "smolvlm", "qwen2_5_vl")
"""The second and the last have a text model that the own decoder does not know, so that transformers runs it."""

_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "pad_token_id": 2,
    "eos_token_id": VOCAB - 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip


def _tokenizer(**named: str) -> Any:
    texts = [*LETTERS, *(f"<{i}>" for i in range(VOCAB - len(LETTERS) - len(SPECIAL))), *SPECIAL]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=named)
    fast.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    return fast


class _QwenProcessor(transformers.Qwen2_5_VLProcessor):  # type: ignore[misc]
    """Qwen's own without the part for videos, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def _write_processor(family: str, folder: Path) -> None:
    if family == "qwen2_5_vl":
        tokenizer = _tokenizer(image_token=IMAGE, video_token=FAKE)
        reader = transformers.Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
        # Qwen's images stand between two tokens, without which transformers counts neighbours as one.
        template = TEMPLATE.replace(IMAGE, f"{_TAGS[0]}{IMAGE}{_TAGS[1]}")
        _QwenProcessor(reader, tokenizer, chat_template=template).save_pretrained(folder)
        return
    if family.startswith("llava"):
        sizes = {"height": 8, "width": 8}
        transformers.LlavaProcessor(
            image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=sizes),
            tokenizer=_tokenizer(), patch_size=4, vision_feature_select_strategy="default", image_token=IMAGE,
            num_additional_image_tokens=1, chat_template=TEMPLATE,
        ).save_pretrained(folder)  # fmt: skip
        return
    # SmolVLM's own processor needs packages for videos; its files differ by the names in them.
    reader = transformers.Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    transformers.Idefics3Processor(reader, _tokenizer(), image_seq_len=4, chat_template=TEMPLATE).save_pretrained(
        folder
    )
    if family == "smolvlm":
        file = folder / "processor_config.json"
        written = json.loads(file.read_text())
        written["image_processor"]["image_processor_type"] = "SmolVLMImageProcessor"
        names = {
            "processor_class": "SmolVLMProcessor",
            "video_processor": {"video_processor_type": "SmolVLMVideoProcessor"},
        }
        file.write_text(json.dumps(written | names))


def _write(model: Any, folder: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


@cache
def vision_model(family: str) -> Path:
    """The directory of a model of a family, in float32. For an image Qwen has as many tokens as it has squares of 8 x 8
    pixels; the others have four for each part of an image.
    """
    folder = Path(mkdtemp()) / family
    _write_processor(family, folder)
    text = {"model_type": family.partition(" of ")[2] or "llama", **_TEXT}
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        positions = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        tower = {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1],
        }  # fmt: skip
        whole = transformers.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": positions}, vision_config=tower, image_token_id=IMAGE_TOKEN,
            video_token_id=_VIDEO_TOKEN,
        )  # fmt: skip
        _write(transformers.Qwen2_5_VLForConditionalGeneration(whole), folder)
        return folder
    if family.startswith("llava"):
        clip = transformers.CLIPVisionConfig(**_VISION, image_size=8, projection_dim=16)
        config = transformers.LlavaConfig(
            vision_config=clip, text_config=transformers.AutoConfig.for_model(**text), image_token_index=IMAGE_TOKEN,
            image_seq_length=4, vision_feature_layer=-1,
        )  # fmt: skip
        _write(transformers.LlavaForConditionalGeneration(config), folder)
        return folder
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
    config = getattr(transformers, f"{name}Config")(
        vision_config={**_VISION, "image_size": 16}, text_config=text, scale_factor=2, image_token_id=IMAGE_TOKEN,
        pad_token_id=2,
    )  # fmt: skip
    _write(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
    return folder


@cache
def two_way_model() -> Path:
    """The directory of a PaliGemma, whose image tokens attend to each other."""
    folder, tokenizer = Path(mkdtemp()) / "paligemma", _tokenizer()
    tokenizer.image_token, tokenizer.image_token_id, tokenizer.bos_token = IMAGE, IMAGE_TOKEN, "a"
    reader = transformers.SiglipImageProcessor(size={"height": 8, "width": 8})
    reader.image_seq_length = 4
    transformers.PaliGemmaProcessor(reader, tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    text = {"model_type": "gemma", **_TEXT, "head_dim": 16}
    vision = {"model_type": "siglip_vision_model", **_VISION, "image_size": 8, "projection_dim": 64}
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, projection_dim=64
    )
    _write(transformers.PaliGemmaForConditionalGeneration(config), folder)
    return folder


@cache
def gemma3_model() -> Path:
    """The directory of a Gemma 3, whose image tokens attend to each other."""
    folder = Path(mkdtemp()) / "gemma3"
    _tokenizer().save_pretrained(folder)
    text = {"model_type": "gemma3_text", **_TEXT, "head_dim": 16, "sliding_window": 8}
    vision = {"model_type": "siglip_vision_model", **_VISION, "image_size": 16}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE_TOKEN,
    )  # fmt: skip
    torch.manual_seed(0)
    _write(transformers.Gemma3ForConditionalGeneration(config), folder)
    return folder


@cache
def reference(family: str) -> tuple[Any, Any]:
    """The model and its processor, as transformers reads them."""
    path = vision_model(family)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    readers = {"llava": transformers.LlavaProcessor, "qwen2_5_vl": _QwenProcessor}
    reader = readers.get(family.partition(" of ")[0], transformers.Idefics3Processor)
    return model.eval(), reader.from_pretrained(path)


@cache
def picture(seed: int, width: int = 8, height: int = 8) -> Path:
    """The file of an image of noise."""
    path = Path(mkdtemp()) / f"{seed}.png"
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)).save(path)
    return path


def data_url(path: Path) -> str:
    """The image as a data URL."""
    return f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"
