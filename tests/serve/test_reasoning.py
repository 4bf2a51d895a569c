"""Reasoning: told from the answer wherever the text is cut, counted, limited, and before structured output."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from serving import NAME, SETTINGS, Server, running_server

from command import save_tiny_model
from foretell.load import load
from foretell.serve.reasoning import REASONING_SYNTAXES, Reasoning, ReasoningParser, reasoning_of
from foretell.serve.thinking import AfterReasoning, Phases
from foretell.serve.tools.cut import completed
from foretell.serve.tools.parts import CallPart, ReasoningPart
from foretell.structured.outputs import StructuredOutputs

HARMONY = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>"
CASES = [
    ("qwen3", "<think>\na\n</think>\n\nb", False, "\na\n", "\n\nb"),
    ("qwen3", "a\n</think>\n\nb", True, "a\n", "\n\nb"),
    ("qwen3", "\n<think>a", True, "a", ""),
    ("qwen3", "a < b </thin", True, "a < b </thin", ""),
    ("qwen3", "plain", False, "", "plain"),
    ("qwen3", "the tag <think> and </think>", False, "", "the tag <think> and </think>"),
    ("qwen3", "a<tool_call>x", True, "a", "<tool_call>x"),
    ("glm45", "<think>\na\n</think>\n\nb", False, "\na", "\n\nb"),
    ("kimi_k2", "<think>a </think>b", False, "a", "b"),
    ("mistral", "[THINK]a[/THINK]b", False, "a", "b"),
    ("gemma4", "<|channel>thought\na<channel|>b", False, "a", "b"),
    ("granite", "Here is my thought process: a Here is my response: b", False, " a ", " b"),
    ("granite_response", "<think>a</think><response>b</response>", False, "a", "b"),
    ("cohere_command3", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", False, "a", "b"),
    ("openai_gptoss", f"{HARMONY}final<|message|>b<|return|>", False, "a", "b"),
    ("openai_gptoss", f"{HARMONY}commentary<|message|>b<|end|>{HARMONY}final<|message|>d", False, "aa", "bd"),
]  # fmt: skip


def read(name: str, pieces: list[str], opened: bool) -> tuple[str, str]:
    parser, thought, said = ReasoningParser(Reasoning(REASONING_SYNTAXES[name], opened, ("<tool_call>",))), "", ""
    for number, piece in enumerate([*pieces, ""]):
        for part in parser.feed(piece, last=number == len(pieces)):
            assert not isinstance(part, CallPart)
            assert not said or not isinstance(part, ReasoningPart) or name == "openai_gptoss"
            thought, said = (
                (thought + part.text, said) if isinstance(part, ReasoningPart) else (thought, said + part.text)
            )
    return thought, said


@pytest.mark.parametrize(("name", "text", "opened", "thought", "said"), CASES)
def test_the_same_reasoning_wherever_the_text_is_cut(
    name: str, text: str, opened: bool, thought: str, said: str
) -> None:
    assert read(name, [text], opened) == read(name, list(text), opened) == (thought, said)
    for i in range(len(text)):
        assert read(name, [text[:i], text[i:]], opened) == (thought, said), text[:i]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("x<think>", "qwen3"),
        ("{{ m.split('</think>') }}", "qwen3"),
        ("<think><arg_key>", "glm45"),
        ("[THINK]", "mistral"),
        ("<|channel>thought", "gemma4"),
        ("<|channel|><|message|>", "openai_gptoss"),
        ("<think><response>", "granite_response"),
        ("<think><response><minimax:tool_call>", "minimax_m2"),  # Results of tools stand in <response>.
    ],
)
def test_the_marks_are_found_by_the_template(template: str | None, name: str | None) -> None:
    assert reasoning_of(template) is (None if name is None else REASONING_SYNTAXES[name])
    assert reasoning_of(template, "none") is None


def test_whether_a_prompt_opens_the_reasoning() -> None:
    syntax = REASONING_SYNTAXES["qwen3"]
    assert syntax.opened_by("user: <think> a\nassistant: <think>\n", False)
    assert not syntax.opened_by("user: <think> a\nassistant: ", False)
    assert not syntax.opened_by("assistant: <think>\n\n</think>\n\n", False)
    assert syntax.opened_by("assistant: <think>\nso far", True)


def test_arguments_that_were_cut_are_completed() -> None:
    text = json.dumps({"a": 'x "{y}" \\ \n é', "b": [1, {"c": True, "d": None}], "e": "z"})
    for end in range(1, len(text)):
        found = json.loads(completed(text[:end]))
        assert isinstance(found, dict) and [*found] == ["a", "b", "e"][: len(found)]
    assert completed("nonsense") == "nonsense"


def rules(budget: int | None, opened: bool, path: Path, json_too: bool) -> tuple[AfterReasoning, Any]:
    model = load(str(path))
    syntax = REASONING_SYNTAXES["qwen3"]
    codec = model.codec
    encode: Callable[[str], list[int]] = lambda text: codec.encode(text, add_special_tokens=False)  # noqa: E731
    texts: Callable[[int], bytes] = lambda token: codec.decode([token], skip_special_tokens=False).encode()  # noqa: E731
    inner = model.constraint(StructuredOutputs(json_object=True)) if json_too else None
    phases = Phases(syntax, texts, opened, to_answer=True)
    vocab = model.config.vocab
    return AfterReasoning(phases, inner, budget, encode("<think>"), encode("</think>"), model.eos, vocab), encode


def allowed(rule: AfterReasoning, tokens: list[int]) -> bool:
    """Whether the mask and the step agree that these tokens may follow each other."""
    state = rule.start()
    for token in tokens:
        mask = rule.mask(state)
        in_mask = bool(mask[token // 8] >> (token % 8) & 1)
        state = rule.advance(state, token)
        assert (state is not None) == in_mask
        if state is None:
            return False
    return True


def test_structured_output_begins_after_the_reasoning(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    rule, encode = rules(None, True, path, json_too=True)
    assert allowed(rule, encode("free text {") + encode("</think>") + encode('{"a":1}'))
    assert not allowed(rule, encode("free text") + encode("</think>") + encode("no"))
    rule, encode = rules(None, False, path, json_too=True)
    assert allowed(rule, encode('{"a":1}')) and not allowed(rule, encode("no"))
    assert allowed(rule, encode("<think>") + encode("no") + encode("</think>") + encode("{}"))


def test_a_budget_ends_the_reasoning(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    rule, encode = rules(3, True, path, json_too=False)
    closing, word = encode("</think>"), encode("a")
    assert allowed(rule, word * 3 + closing + word * 9)
    assert not allowed(rule, word * 4)
    state = rule.start()
    for token in word * 3:
        state = rule.advance(state, token)
    assert list(rule.forced(state)[0]) == closing
    rule, _ = rules(0, True, path, json_too=False)
    assert allowed(rule, closing + word) and not allowed(rule, word)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    config = path / "tokenizer_config.json"
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
    )
    found = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(found | {"chat_template": template}))
    (path / "chat_template.jinja").write_text(template)
    with running_server(replace(SETTINGS, reasoning_budget=5), path=path) as running:
        yield running


QUESTION: Any = [{"role": "user", "content": "hi"}]


def test_chat_completions(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": NAME, "messages": QUESTION, "max_tokens": 40, "temperature": 1, "seed": 3}
        options["response_format"] = {"type": "json_object"}
        whole = client.chat.completions.create(**options)
        message: Any = whole.choices[0].message
        assert message.reasoning_content and message.reasoning == message.reasoning_content
        assert (message.content or "{").startswith("{")
        assert whole.usage.completion_tokens_details.reasoning_tokens == 5
        parts: list[Any] = [
            c.choices[0].delta for c in client.chat.completions.create(**options, stream=True) if c.choices
        ]
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in parts) == message.reasoning_content
        assert "".join(d.content or "" for d in parts) == (message.content or "")
        history = [*QUESTION, {"role": "assistant", "content": "a", "reasoning_content": "because"}, *QUESTION]
        prompt: Any = client.chat.completions.create(
            **(options | {"messages": history, "max_tokens": 1}), extra_body={"return_token_ids": True}
        )
        tokens = prompt.prompt_token_ids
        assert "because" in client.post("/../detokenize", body={"tokens": tokens}, cast_to=object)["prompt"]  # type: ignore[index]


def test_responses_and_messages(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.responses.create(model=NAME, input="hi", max_output_tokens=20)
        thought: Any = found.output[0]
        assert thought.type == "reasoning" and thought.content[0].type == "reasoning_text"
        assert found.usage is not None and found.usage.output_tokens_details.reasoning_tokens == 5
        kinds = [e.type for e in client.responses.create(model=NAME, input="hi", max_output_tokens=20, stream=True)]
        assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds
        items: Any = [{"role": "user", "content": "hi"}, thought.model_dump(), {"role": "user", "content": "x"}]
        assert client.responses.create(model=NAME, input=items, max_output_tokens=2).output
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model=NAME, messages=QUESTION, max_tokens=20)
        assert message.content[0].type == "thinking" and message.content[0].thinking
        history: Any = [*QUESTION, {"role": "assistant", "content": message.content}, *QUESTION]
        with other.messages.stream(model=NAME, messages=history, max_tokens=20) as stream:
            assert stream.get_final_message().content[0].type == "thinking"


PLACE: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"],
                         "additionalProperties": False}  # fmt: skip


def test_calls_follow_the_reasoning_in_every_api(server: Server) -> None:
    arguments = '{"city": "Paris"}'
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat: Any = {
            "model": NAME, "messages": QUESTION, "max_tokens": 300, "parallel_tool_calls": False,
            "tools": [{"type": "function", "function": {"name": "w", "parameters": PLACE}}], "tool_choice": "required",
        }  # fmt: skip
        message: Any = client.chat.completions.create(**chat).choices[0].message
        assert message.reasoning_content and message.tool_calls[0].function.arguments == arguments
        responses: Any = {
            "model": NAME, "input": "hi", "max_output_tokens": 300, "parallel_tool_calls": False,
            "tools": [{"type": "function", "name": "w", "parameters": PLACE}], "tool_choice": "required",
        }  # fmt: skip
        whole: Any = client.responses.create(**responses)
        events: list[Any] = list(client.responses.create(**responses, stream=True))
        for output in (whole.output, events[-1].response.output):
            assert [item.type for item in output] == ["reasoning", "function_call"] and output[0].content[0].text
            assert output[1].arguments == arguments
        assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == arguments
        assert whole.usage.output_tokens_details.reasoning_tokens == 5
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        options: Any = {
            "model": NAME, "messages": QUESTION, "max_tokens": 300, "tools": [{"name": "w", "input_schema": PLACE}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }  # fmt: skip
        with other.messages.stream(**options) as stream:
            streamed: Any = stream.get_final_message()
        for answer in (other.messages.create(**options), streamed):
            content: Any = answer.content
            assert [block.type for block in content] == ["thinking", "tool_use"] and content[0].thinking
            assert content[1].input == {"city": "Paris"} and answer.stop_reason == "tool_use"
