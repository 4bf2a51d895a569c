"""What the documents say works."""

import re
from pathlib import Path

from foretell.catalogue import Entry, Parts
from foretell.config import SpeculativeConfig
from foretell.engine import Engine, Request
from foretell.model.runner import DecoderRunner
from foretell.testing import TINY, tiny_decoder

ROOT = Path(__file__).parent.parent


def _example() -> Entry:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    code = re.search(r"<!-- example: drafter -->\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    space: dict[str, object] = {}
    exec(code[1], space)
    entry = space["ENTRY"]
    assert isinstance(entry, Entry)
    return entry


def test_the_drafter_of_the_design_page_is_lossless() -> None:
    decoder, entry = tiny_decoder(), _example()

    def generate(method: str) -> tuple[list[int], float]:
        made = (entry if method == entry.name else plain).build(Parts(TINY.vocab, decoder), SpeculativeConfig())
        engine = Engine(DecoderRunner(decoder), made)
        (done,) = engine.complete([Request([1, 2, 3, 1, 2], max_new_tokens=60)])
        return list(done.tokens), done.statistics.tokens_per_pass

    from foretell.catalogue import find

    plain = find("autoregressive")
    expected, _ = generate("autoregressive")
    found, tokens_per_pass = generate(entry.name)
    assert found == expected
    assert tokens_per_pass > 1


def test_every_method_has_its_section() -> None:
    from foretell.catalogue import BUILT_IN

    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (.+)$", text, re.MULTILINE))
    missing = [e.name for e in BUILT_IN if not any(e.name in s.replace("`", "").split() for s in sections)]
    assert not missing, f"docs/methods.md has no section for {missing}"


def test_the_readme_lists_the_catalogue() -> None:
    from foretell.catalogue import BUILT_IN

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("<!-- table: methods -->")[1].split("<!-- end -->")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [e.name for e in BUILT_IN]
