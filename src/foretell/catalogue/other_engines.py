"""Methods that draft beside another engine's target, for plug-ins of that engine."""

from collections.abc import Mapping
from pathlib import Path

from foretell.catalogue.build_context import BuildContext
from foretell.catalogue.registry import build, find
from foretell.draft.base import Retriever
from foretell.engine.method import AnyMethod
from foretell.model.load.reference import resolve_reference
from foretell.tokenizer.codec import TextCodec, from_directory


def retrieval_method(options: Mapping[str, object], vocab: int, tokenizer: str) -> AnyMethod:
    """The method that `options` name: `method` (default: sam_recycling), `references` (text files), and its own
    options. `tokenizer`: a directory or a model of the hub, which is read where texts are.

    Raises:
        ValueError: the method is unknown or needs parts of the target, or an option is wrong.
    """
    own = dict(options)
    name, files = str(own.pop("method", "sam_recycling")), own.pop("references", ())
    if not issubclass(find(name).drafter, Retriever):
        raise ValueError(
            f"{name} does not draft by retrieval; beside another engine ngram, llma, suffix, recycling, sam_recycling, "
            "hybrid and rest draft"
        )
    if not isinstance(files, list | tuple):
        raise ValueError(f"references is a list of text files, found {files!r}")
    codec = _codec(tokenizer) if files or "datastore" in own else None
    references = tuple(tuple(codec.encode(_text(file), False)) for file in files) if codec else ()
    return build(name, BuildContext(vocab, None, references=references, codec=codec), own or None)


def _text(file: object) -> str:
    try:
        return Path(str(file)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"reference {file} cannot be read: {error}") from error


def _codec(tokenizer: str) -> TextCodec:
    return from_directory(resolve_reference(tokenizer))
