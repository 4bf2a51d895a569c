"""Images in prompts: transformers gives what the decoder reads in their places."""

import hashlib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.tree import tree_from_lists
from foretell.model.load.transformers import HFRunner, import_transformers, load_error, load_vision, quiet
from foretell.model.run.runner import PromptImages

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of images that are opened."""
_MOST_PIXELS = 1 << 25
"""Larger images are refused before they are decoded."""
_KEPT = 8
"""Images whose embeddings are kept for later prompts, those used last."""
_READERS = {
    "smolvlm": "Idefics3Processor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
}
"""Processors of models whose own one needs packages for videos; that of Idefics 3 writes images as SmolVLM's does."""
UNREAD = "image tokens that attend to later ones, as those of Gemma 3 do, are not read"
"""For refusals of an image."""
_TOLERANCE = 0.02
"""Of the largest logit, between our passes behind an image and the model's own."""


class ReadImage(NamedTuple):
    """An image as a decoder reads it."""

    tokens: tuple[int, ...]
    """What stands in a prompt for the image; the image token in every place that has an embedding."""
    embeddings: Float[torch.Tensor, "k d"]
    digest: str
    axes: Int[np.ndarray, "3 n"] | None = None
    """Positions of the tokens by time, height and width; None: one after the other."""


class ImagePrompt(NamedTuple):
    """A prompt in which every image stands for its tokens, and what the decoder reads in their places."""

    tokens: list[int]
    images: PromptImages


@dataclass(frozen=True)
class VisionLanguage:
    """The part of a vision-language model that reads images, by transformers.

    `path`: the directory of the model and its processor. `image_token`: the token that stands for an image in a chat
    template's output. `model`: the whole model, where transformers runs it; None: its vision encoder and connector
    alone are read, when the first image comes. Any thread may ask.
    """

    path: Path
    image_token: int
    device: torch.device
    dtype: torch.dtype
    model: Any = None
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)
    _kept: dict[str, ReadImage] = field(default_factory=dict, repr=False, compare=False)
    """By the digest of their file; the one used last at the end."""

    def read(self, data: bytes) -> ReadImage:
        """Read the file of an image.

        Raises:
            ValueError: it is no image or has too many pixels, transformers or Pillow is missing, the model or its
                processor cannot be loaded, or the model reads images in a way that token trees cannot follow.
        """
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:  # one image at a time takes memory
            read = self._kept.pop(digest, None) or self._read(_open(data), digest)
            self._kept[digest] = read
            if len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return read

    def place(self, tokens: Sequence[int], images: Sequence[ReadImage]) -> ImagePrompt:
        """A prompt in which the n-th image token stands for the n-th image.

        Raises:
            ValueError: there are more or fewer image tokens than images, or none.
        """
        places = list(tokens).count(self.image_token)
        if not images or places != len(images):
            raise ValueError(f"the prompt names {places} places for images, and there are {len(images)} images")
        left, expanded, starts = iter(images), list[int](), list[int]()
        for token in tokens:
            starts += [len(expanded)] * (token == self.image_token)
            expanded += next(left).tokens if token == self.image_token else [token]
        digest = hashlib.sha256("".join(image.digest for image in images).encode()).hexdigest()
        positions, embeddings = np.flatnonzero(np.array(expanded) == self.image_token), [i.embeddings for i in images]
        axes = _axes(len(expanded), [(s, i.axes) for s, i in zip(starts, images, strict=True) if i.axes is not None])
        return ImagePrompt(expanded, PromptImages(positions, torch.cat(embeddings), digest, axes))

    @cached_property
    def _processor(self) -> Any:
        transformers = import_transformers("images are read by transformers")
        reader = _READERS.get(self._encoder.config.model_type, "AutoProcessor")
        try:
            with quiet(transformers):
                return _without_videos(getattr(transformers, reader)).from_pretrained(
                    self.path, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # Depends on the files that are there.
            raise load_error(self.path, error) from error

    @cached_property
    def _encoder(self) -> Any:
        return load_vision(self.path, self.dtype, self.device) if self.model is None else self.model

    @torch.inference_mode()
    def _read(self, picture: Any, digest: str) -> ReadImage:
        processor, encoder = self._processor, self._encoder.base_model
        try:
            inputs = processor(
                text=str(processor.image_token), images=[picture], add_special_tokens=False, return_tensors="pt"
            ).to(self.device, self.dtype)
            embeddings = _embeddings(encoder, inputs)
            axes = _asked(getattr(encoder, "get_rope_index", None), inputs)
        except Exception as error:  # Depends on the processor and the model.
            raise ValueError(f"{self.path}: this model cannot read this image ({error})") from error
        tokens = tuple(inputs["input_ids"][0].tolist())
        if embeddings is None or len(embeddings) != tokens.count(self.image_token):
            raise self._unreadable()
        read = ReadImage(tokens, embeddings, digest, None if axes is None else axes[0][:, 0].cpu().numpy())
        if self.model is not None:
            self._check(read, inputs)
        return read

    def _check(self, read: ReadImage, inputs: Any) -> None:
        """Compare our reading of an image with that of the whole model."""
        runner, n, own = HFRunner(self.model), len(read.tokens), self.model(**inputs, use_cache=False).logits[0, -1]
        places = np.flatnonzero(np.array(read.tokens) == self.image_token)
        runner.show(0, PromptImages(places, read.embeddings, "", read.axes))
        ours = runner.forward([0], tree_from_lists([read.tokens], [range(-1, n - 1)])).logits[-1]
        if (ours - own.to(ours.dtype)).abs().max() > _TOLERANCE * ours.abs().max():
            raise self._unreadable()

    def _unreadable(self) -> ValueError:
        return ValueError(
            f"{self.path}: this model reads images in a way that token trees cannot follow (positions, attention or "
            "embeddings of its own for them); use a model of the Llava, Idefics or Qwen2.5-VL kind"
        )


def _axes(length: int, images: Sequence[tuple[int, Int[np.ndarray, "3 k"]]]) -> Int[np.ndarray, "3 n"] | None:
    """Positions of the tokens of a prompt by time, height and width, with images that begin at these places; None:
    there are no images that count so.

    Text behind an image goes on after the largest position in it (Qwen2-VL, arXiv 2409.12191).
    """
    if not images:
        return None
    axes = np.tile(np.arange(length), (3, 1))
    for start, own in images:
        end = start + own.shape[1]
        axes[:, start:end] = axes[:, start : start + 1] + own
        axes[:, end:] += own.max() + 1 - own.shape[1]
    return axes


def _embeddings(encoder: Any, inputs: Mapping[str, Any]) -> Float[torch.Tensor, "k d"] | None:
    """What the connector gives for the images of a prompt; None: the model has no such function."""
    features = _asked(getattr(encoder, "get_image_features", None), inputs)
    if features is None:
        return None
    features = getattr(features, "pooler_output", features)
    parts = [features] if isinstance(features, torch.Tensor) else features
    return torch.cat([part.flatten(0, -2) for part in parts])


def _without_videos(reader: Any) -> Any:
    """The class of a processor without its part for videos."""
    names: list[str] = getattr(reader, "get_attributes", list)()
    if "video_processor" not in names:
        return reader
    names.remove("video_processor")
    return type(reader.__name__, (reader,), {"get_attributes": staticmethod(lambda: names)})


def _asked(function: Any, inputs: Mapping[str, Any]) -> Any:
    """What a function of the model gives for those of the inputs that it takes; None: the model has none."""
    if function is None:
        return None
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in inputs.items() if name in known})


def _open(data: bytes) -> Any:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ValueError("images need Pillow: pip install pillow") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our limit is lower
            image = Image.open(BytesIO(data), formats=FORMATS)
        if image.width * image.height <= _MOST_PIXELS:
            return _in_rgb(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:
        raise ValueError(f"the image has too many pixels; at most {_MOST_PIXELS:,} are read") from error
    except Exception as error:  # A damaged file raises nearly anything.
        raise ValueError(f"not an image that can be read; give one of {', '.join(FORMATS)}") from error
    raise ValueError(f"the image has {image.width} x {image.height} pixels, and at most {_MOST_PIXELS:,} are read")


def _in_rgb(image: Any) -> Any:
    """The image on white, as transformers' processors show it; greys of 16 bits, which Pillow cuts, in 8 bits."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")
