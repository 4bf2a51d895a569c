# %% [markdown]
# # Train a speculator, and see what it learns
#
# The three steps for a model of your own: texts that the model writes, a training, a measurement. The sizes here take a
# minute or two and give a poor speculator; `docs/training.md` says what a good one takes. Needs
# `pip install 'foretell[train]'`.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import foretell

work = Path(tempfile.mkdtemp())
TOKENS, STEPS = 4000, 30


def run(*arguments: str) -> None:
    """A command of `foretell`."""
    subprocess.run([sys.executable, "-m", "foretell", *arguments], check=True)


# %% [markdown]
# The model asks itself questions and answers them. Prompts like those you will serve are better: `--prompts FILE`.

# %%
run("data", "generate", "--self", "--tokens", str(TOKENS), "--max-answer", "96", "--out", str(work / "answers"))

# %% [markdown]
# The network that is trained reads the target's hidden states. The folder then has weights, a card and a curve.

# %%
run(
    "train", "mlp_speculator", "--data", str(work / "answers"), "--out", str(work / "mine"), "--steps", str(STEPS),
    "--measure-prompts", "2", "--measure-tokens", "32",
)  # fmt: skip
print((work / "mine" / "README.md").read_text().partition("## Command")[0])

# %% [markdown]
# What it drafts, beside the speculator that ships, which read millions of tokens. The text is the same with both.

# %%
model = foretell.load("smollm2-135m")
question = "What is a good way to learn a language?"
plain = model.generate(question, max_new_tokens=64)[0]
for name, drafts in (("mine", [work / "mine"]), ("shipped", [])):
    answer = model.generate(question, method=model.method("mlp_speculator", drafts=drafts), max_new_tokens=64)[0]
    assert answer.tokens == plain.tokens
    print(f"{name}: {answer.statistics.tokens_per_pass:.2f} tokens per pass")
