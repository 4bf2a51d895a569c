"""Images in chat completions: answers of OpenAI's client, the prefix cache, and errors."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from serving import NAME, Server, running_server

import foretell
from vision import IMAGE, IMAGE_TOKEN, data_url, picture, reference, vision_model

TEXT = "abcabcabcab"
PICTURE, OTHER = picture(1, 40, 24), picture(2, 40, 24)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = foretell.load(str(vision_model("smolvlm")), "float32")
    with running_server(loaded_model=model) as found:
        yield found


@pytest.fixture(scope="module")
def text_server() -> Iterator[Server]:
    with running_server() as found:
        yield found


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def ask(server: Server, *messages: Any, **fields: Any) -> Any:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/chat/completions", body | fields).json()


def text_of_transformers(messages: list[Any], pictures: list[Any], tokens: int = 12, family: str = "smolvlm") -> str:
    """What the model of transformers answers, greedily."""
    from PIL import Image

    model, processor = reference(family)
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    images = [Image.open(p) for p in pictures] or None
    inputs = processor(text=text, images=images, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
    return str(processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_answers_of_a_conversation_are_those_of_transformers(server: Server) -> None:
    turns = [user(image(data_url(PICTURE), detail="low"), TEXT)]
    own: list[Any] = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": TEXT}]}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": NAME, "messages": turns, "max_tokens": 12, "temperature": 0}
        found = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        streamed = client.chat.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True)
        pieces = [piece.choices[0].delta.content or "" for piece in streamed]
    first = found.choices[0].message.content
    assert first == "".join(pieces) == text_of_transformers(own, [PICTURE])
    # A second turn, whose answer before is a string, names another image behind text.
    turns += [{"role": "assistant", "content": "abc"}, user("xyz ", image(data_url(OTHER)), "?")]
    own += [
        {"role": "assistant", "content": [{"type": "text", "text": "abc"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "xyz "}, {"type": "image"}, {"type": "text", "text": "?"}],
        },
    ]
    assert ask(server, *turns)["choices"][0]["message"]["content"] == text_of_transformers(own, [PICTURE, OTHER])


def test_answers_of_a_model_with_positions_by_height_and_width_are_those_of_transformers() -> None:
    family, turn = "qwen2_5_vl", user(image(data_url(PICTURE)), TEXT, image(data_url(OTHER)))
    parts = [{"type": "image"}, {"type": "text", "text": TEXT}, {"type": "image"}]
    expected = text_of_transformers([{"role": "user", "content": parts}], [PICTURE, OTHER], family=family)
    for method in ("autoregressive", "suffix"):
        with running_server(loaded_model=foretell.load(str(vision_model(family)), "float32"), method=method) as found:
            assert ask(found, turn)["choices"][0]["message"]["content"] == expected


def test_prompts_of_different_images_share_no_prefix(server: Server) -> None:
    def cached(seed: int) -> tuple[str, int]:
        found = ask(server, user(image(data_url(picture(seed, 40, 24))), "bcd"))
        details = found["usage"].get("prompt_tokens_details") or {}
        return found["choices"][0]["message"]["content"], details.get("cached_tokens", 0)

    (one, none), (other, too) = cached(3), cached(4)
    assert one != other and none == too == 0
    again = cached(3)
    assert again[0] == one and again[1] > 30


def test_choices_and_tokens_are_of_the_whole_prompt(server: Server) -> None:
    message = user(image(data_url(PICTURE)), TEXT)
    tokens = server.post("/tokenize", {"messages": [message]}).json()["tokens"]
    # Six parts of the picture and the whole, in four places each.
    assert tokens.count(IMAGE_TOKEN) == 4 * (tokens.count(IMAGE_TOKEN) // 4) > 4
    found = ask(server, message, n=2)
    assert found["usage"]["prompt_tokens"] == len(tokens)
    assert found["choices"][0]["message"] == found["choices"][1]["message"]


def test_the_text_of_the_image_token_is_text(server: Server) -> None:
    tokens = server.post("/tokenize", {"messages": [user(f"a{IMAGE}b")]}).json()["tokens"]
    assert IMAGE_TOKEN not in tokens
    assert ask(server, user(f"a{IMAGE}b"))["choices"][0]["finish_reason"] == "length"


def test_texts_beside_an_image_are_read_whatever_their_type(server: Server) -> None:
    picture_part = image(data_url(PICTURE))
    typed = server.post("/tokenize", {"messages": [user(picture_part, TEXT)]}).json()["tokens"]
    for part in ({"text": TEXT}, {"type": "input_text", "text": TEXT}, {"type": "image", "text": TEXT}):
        assert server.post("/tokenize", {"messages": [user(picture_part, part)]}).json()["tokens"] == typed


@pytest.mark.parametrize(
    "write",
    [
        lambda url: url.replace("data:image/png;base64,", "DATA:Image/PNG;base64,"),
        lambda url: url.replace("/", "%2F").replace("+", "%2B").replace("=", "%3D").replace("image%2F", "image/"),
        lambda url: url[:90] + "\r\n" + url[90:] + "\n",
    ],
)
def test_data_urls_are_read_in_every_spelling(server: Server, write: Callable[[str], str]) -> None:
    # RFC 2397, and RFC 3986 for case and percents; Python's own reader of data URLs takes the same ones.
    plain = data_url(PICTURE)
    url = write(plain)
    with urlopen(url) as one, urlopen(plain) as other:
        assert one.read() == other.read()
    asked = [server.post("/tokenize", {"messages": [user(image(u))]}).json()["tokens"] for u in (url, plain)]
    assert asked[0] == asked[1]


def test_an_image_stays_where_tools_are_written_as_text(server: Server) -> None:
    # The template writes no tools.
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        user(image(data_url(PICTURE)), TEXT),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "abc"},
    ]
    tokens = server.post("/tokenize", {"messages": history}).json()["tokens"]
    first = server.post("/tokenize", {"messages": history[:1], "add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(first)] == first and IMAGE_TOKEN in first


GOOD = image(data_url(PICTURE))
TEXT_ONLY = "this model reads text only"


@pytest.mark.parametrize(
    ("messages", "fields", "param", "message"),
    [
        ([user(image("https://example.org/a.png"))], {}, "messages.0.content.0", "this server fetches nothing"),
        ([user("a", image("file:///etc/passwd"))], {}, "messages.0.content.1", "this server fetches nothing"),
        ([user(image("data:image/png;base64,?"))], {}, "messages.0.content.0", "no base64"),
        ([user(image("data:image/png,abc"))], {}, "messages.0.content.0", "no base64"),
        ([user(image("data:image/png;base64,aGFsbG8="))], {}, "messages.0.content.0", "not an image"),
        ([user(*[GOOD] * 9)], {}, "messages", "messages have 9 images, and this server takes at most 8"),
        ([{**user(GOOD), "role": "system"}], {}, "messages.0.content.0", "images are read in messages of the user"),
        ([user({"type": "image_url"})], {}, "messages.0.content", "part 0 is an image_url without a url"),
        (
            [user(GOOD)],
            {"truncate_prompt_tokens": 9},
            "truncate_prompt_tokens",
            "a prompt with images is not shortened",
        ),
        ([user(GOOD)], {"plan": "skeleton"}, "messages", "a plan writes its own prompts"),
        ([user(GOOD)] * 8, {}, "messages", "maximum context length is 256 tokens"),
    ],
)
def test_bad_images_are_one_sentence(
    server: Server, messages: list[Any], fields: dict[str, Any], param: str, message: str
) -> None:
    found = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8} | fields)
    error = found.json()["error"]
    assert found.status_code == 400, found.text
    assert error["param"] == param and message in error["message"] and "\n" not in error["message"]


def test_completions_and_text_models_refuse_images(server: Server, text_server: Server) -> None:
    found = server.post("/v1/completions", {"prompt": f"{IMAGE}abc"})
    assert found.status_code == 400 and "send images to /v1/chat/completions" in found.json()["error"]["message"]
    found = server.post("/v1/completions", {"prompt": [user(GOOD)]})
    assert found.status_code == 400 and found.json()["error"]["param"] == "prompt"
    found = text_server.post("/v1/chat/completions", {"messages": [user(GOOD)]})
    assert found.status_code == 400 and TEXT_ONLY in found.json()["error"]["message"]


def test_a_picture_of_too_many_pixels_is_not_decoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.model.load.images._MOST_PIXELS", 100)
    error = ask(server, user(image(data_url(picture(9, 16, 16)))))["error"]
    assert error["message"] == "the image has 16 x 16 pixels, and at most 100 are read"
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)  # Pillow refuses twice as many
    error = ask(server, user(image(data_url(picture(10, 16, 16)))))["error"]
    assert error["message"] == "the image has too many pixels; at most 100 are read"
