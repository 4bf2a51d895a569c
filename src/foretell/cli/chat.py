"""`foretell chat`: a conversation with a model in the terminal."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from foretell.cli import options
from foretell.cli.errors import print_error
from foretell.utils.names import unknown

if TYPE_CHECKING:
    from foretell.api import Answer
    from foretell.cli.prompts import PromptDefaults
    from foretell.cli.setup import ModelSetup
    from foretell.engine.engine import Engine
    from foretell.engine.request import Request
    from foretell.tokenizer.codec import Message

app = typer.Typer(pretty_exceptions_enable=False)

HELP = """/method NAME   decode with another method from now on
/reset         start a new conversation
/stats         speed of the answers so far
/help          this list
/quit          leave (as Ctrl-D does); Ctrl-C stops an answer"""


@app.command()
@options.with_target()
@options.with_parameters(in_chat=True, max_new_tokens=512)
def chat(
    model: options.Model = options.DEFAULT_MODEL,
    method: options.Method = None,
    parameters: options.Parameters = options.NO_PARAMETERS,
    system: options.System = None,
    allow_special_tokens: options.AllowSpecialTokens = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    draft_model: options.DraftModel = None,
    reference: options.Reference = None,
    target: options.Target = options.NO_TARGET,
    speculative_config: options.SpeculativeJson = None,
) -> None:
    """Chat with a model. The text of accepted draft tokens is green.

    Lines that start with / are commands; /help lists them.
    """
    from foretell.cli.prompts import PromptDefaults
    from foretell.cli.setup import load_models, parse_method
    from foretell.core.target_options import TargetOptions

    selection = parse_method(method, speculative_config, draft_model)
    target_options = TargetOptions(**target)
    setup = load_models(model, dtype, device, selection, reference, target_options=target_options)
    if setup.model.codec.chat_template is None:
        raise ValueError(f"{model}: a chat needs a chat template, and this model has none; use `foretell generate`")
    defaults = PromptDefaults(parameters, False, system, allow_special_tokens)
    try:
        run_conversation(Chat(setup, selection.name, defaults))
    finally:
        setup.model.pass_times.close()


def run_conversation(conversation: "Chat") -> None:
    """Read and handle lines until /quit or the end of the input."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 (gives input() its editing keys)

        print(
            f"{conversation.setup.model.name}, {conversation.engine.method.name}; /help lists the commands",
            file=sys.stderr,
        )
    while not conversation.finished:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)", file=sys.stderr)
            continue
        try:
            conversation.handle_line(line)
        except ValueError as error:
            print_error(str(error))


@dataclass
class Chat:
    """The messages so far, and the engine that answers."""

    setup: "ModelSetup"
    method: str
    defaults: "PromptDefaults"
    messages: "list[Message]" = field(default_factory=list)
    answers: "list[Answer]" = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        self.engine = self._engine(self.method)
        self.reset()

    def handle_line(self, line: str) -> None:
        """Answer a line, or run its command.

        Raises:
            ValueError: no such command or method, or the conversation is longer than the model's context.
        """
        if line.startswith("/"):
            self._run_command(line)
        elif line:
            self._answer(line)

    def reset(self) -> None:
        """Start again with nothing but the system message."""
        self.messages = [] if self.defaults.system is None else [{"role": "system", "content": self.defaults.system}]

    def _run_command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        commands: Mapping[str, Callable[[str], None]] = {
            "/method": self._change_method, "/reset": lambda _: self.reset(), "/stats": lambda _: self._stats(),
            "/help": lambda _: print(HELP, file=sys.stderr), "/quit": lambda _: self._quit(),
        }  # fmt: skip
        if word not in commands:
            raise unknown("command", word, commands)
        commands[word](rest.strip())

    def _change_method(self, name: str) -> None:
        if not name:
            raise ValueError(
                f"the method is {self.engine.method.name}; change it with /method NAME, see `foretell methods`"
            )
        self.engine = self._engine(name)
        print(f"decoding with {self.engine.method.name}", file=sys.stderr)

    def _quit(self) -> None:
        self.finished = True

    def _stats(self) -> None:
        from foretell.cli.show import print_status, summary_line

        if not self.answers:
            raise ValueError("there is no answer yet")
        for name in dict.fromkeys(a.method for a in self.answers):
            answers = [a for a in self.answers if a.method == name]
            seconds = sum(a.statistics.prefill_seconds + a.statistics.decode_seconds for a in answers)
            print_status(summary_line(answers, seconds))

    def _answer(self, line: str) -> None:
        """Stream an answer and add it to the conversation; after Ctrl-C, as far as it came."""
        from foretell.api import Answer
        from foretell.cli.interrupt import Interrupt, run_until_interrupt
        from foretell.cli.show import AnswerWriter, DraftHighlighter, print_status, summary_line
        from foretell.engine.request import Completion, Update

        defaults, model = self.defaults, self.setup.model
        messages: list[Message] = [*self.messages, {"role": "user", "content": line}]
        request = model.request(messages, **defaults.options())
        number, received = self._submit(request), list[Update]()
        writer = AnswerWriter(DraftHighlighter(model.codec.detokenizer()))
        with Interrupt() as interrupt:
            for update in run_until_interrupt(self.engine, [number], interrupt):
                writer.write(update)
                received.append(update)
        writer.finish()
        answer = Answer.from_completion(Completion.of(received), self.engine)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)
        print_status(summary_line([answer], 0.0))
        if answer.error:
            print_error(answer.error)

    def _submit(self, request: "Request") -> int:
        try:
            return self.engine.submit(request)
        except ValueError as error:
            raise ValueError(f"{error}; /reset starts a new conversation") from error

    def _engine(self, name: str) -> "Engine":
        from foretell.cli.drafter_check import checked

        method = self.setup.method(name) if name == self.method else self.setup.other_method(name)
        return self.setup.model.engine(checked(self.setup, method), rows=1, prefix_caching=True)
