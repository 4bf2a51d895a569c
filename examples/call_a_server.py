# %% [markdown]
# # Call a server with OpenAI's client
#
# Starts `foretell serve` on a free port, streams an answer, asks for the same without drafts, gives a predicted output,
# and asks for JSON. Needs `pip install 'foretell[serve,structured]' openai`.

# %%
import atexit
import json
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

from openai import OpenAI

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([sys.executable, "-m", "foretell", "serve", "--port", str(port)], stderr=subprocess.DEVNULL)
atexit.register(server.terminate)
client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def healthy() -> bool:
    """Whether the server answers: /health is 503 while the model loads."""
    try:
        return bool(urlopen(f"http://127.0.0.1:{port}/health").status == 200)
    except OSError:
        return False


while server.poll() is None and not healthy():
    time.sleep(0.3)
name = client.models.list().data[0].id

# %% [markdown]
# A stream, and the same request without drafts: with a seed, the text is the same.


# %%
def ask(question: str, **extra: object) -> str:
    """The text of a streamed answer."""
    stream = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": question}],
        max_tokens=48,
        seed=1,
        stream=True,
        extra_body=extra,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


drafted = ask("Why do leaves fall in autumn?")
plain = ask("Why do leaves fall in autumn?", speculative={"max_drafts": 0})
assert drafted == plain
print(drafted)

# %% [markdown]
# Where most of the answer is known, give it as `prediction`: what agrees is accepted in few passes.

# %%
code = "def area(width, height):\n    return width * height\n"
answer = client.chat.completions.create(
    model=name,
    messages=[{"role": "user", "content": f"Repeat this code unchanged:\n\n{code}"}],
    prediction={"type": "content", "content": code},
    max_tokens=48,
    temperature=0,
)
assert answer.usage is not None
print(answer.usage.completion_tokens_details)

# %% [markdown]
# JSON that fits a schema, whatever the model would have written.

# %%
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "maximum": 99999999}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=name,
    messages=[{"role": "user", "content": "Name a large city and its population, as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    max_tokens=64,
    temperature=0,
)
print(json.loads(answer.choices[0].message.content or ""))
