"""Images before a text: prompts of vision-language models that transformers runs."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float

from foretell.core.tree import tree_from_lists
from foretell.model.load.transformers import HFRunner, ImagePrompt, import_transformers, load_error

_TOLERANCE = 0.02
"""Of the largest logit, between our passes behind an image and the model's own."""


@dataclass(frozen=True)
class VisionLanguage:
    """A vision-language model and the directory of its processor."""

    model: Any
    path: Path

    def prompt(self, images: Sequence[Path], text: str, raw: bool) -> ImagePrompt:
        """The prompt of one user message: the images, then the text. `raw`: the text itself names the places of the
        images, and no chat template is applied.

        Raises:
            ValueError: a file is no image, the processor cannot be loaded, the text does not name as many places as
                there are images, or the model reads images in a way that token trees cannot follow.
        """
        pictures = [_open(file) for file in images]
        processor = self._processor()
        if not raw and processor.chat_template:
            content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
            text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        elif not raw:
            text = f"{processor.image_token * len(images)}\n{text}"
        try:
            inputs = processor(text=text, images=pictures, return_tensors="pt")
        except Exception as error:  # Depends on the processor.
            raise ValueError(f"{self.path}: its processor cannot read this prompt ({error})") from error
        return self._read(inputs.to(self.model.device, self.model.dtype))

    def _processor(self) -> Any:
        try:
            return import_transformers().AutoProcessor.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # Depends on the files that are there.
            raise load_error(self.path, error) from error

    @torch.inference_mode()
    def _read(self, inputs: Any) -> ImagePrompt:
        """The model's own pass over the prompt: what its decoder sees in the place of each token, and its logits."""
        seen: list[Float[torch.Tensor, "1 n d"]] = []

        def note(module: Any, arguments: Any, named: Any) -> None:
            if not seen and named.get("inputs_embeds") is not None:
                seen.append(named["inputs_embeds"].clone())

        text_config = self.model.config.get_text_config()
        with ExitStack() as hooks:
            for module in self.model.modules():
                if module is not self.model and getattr(module, "config", None) is text_config:
                    hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
            logits = self.model(**inputs, use_cache=False).logits[0, -1]
        tokens = inputs["input_ids"]
        if not seen or seen[0].shape[1] != tokens.shape[1]:
            raise self._unreadable()
        places = (seen[0] != self.model.get_input_embeddings()(tokens)).any(-1)[0]
        if not places.any():
            raise ValueError("the prompt names no place for an image: leave out --raw, or write the image token")
        prompt = ImagePrompt(tuple(tokens[0].tolist()), seen[0][0], places.cpu().numpy())
        self._check(prompt, logits)
        return prompt

    def _check(self, prompt: ImagePrompt, logits: Float[torch.Tensor, " v"]) -> None:
        """Compare our reading of the prompt with the model's own."""
        runner, n = HFRunner(self.model, prompt), len(prompt.tokens)
        ours = runner.forward([0], tree_from_lists([prompt.tokens], [range(-1, n - 1)])).logits[-1]
        if (ours - logits.to(ours.dtype)).abs().max() > _TOLERANCE * ours.abs().max():
            raise self._unreadable()

    def _unreadable(self) -> ValueError:
        return ValueError(
            f"{type(self.model).__name__} reads images in a way that token trees cannot follow (positions or attention "
            "of its own for them); use a model of the Llava or Idefics kind"
        )


def _open(file: Path) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ValueError("images need Pillow: pip install pillow") from error
    try:
        return Image.open(file).convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError(f"{file}: not an image that Pillow reads; convert it to PNG or JPEG") from error
