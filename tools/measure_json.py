"""JSON by schema against free text of a running server: tokens per second of decoding, one request at a time, greedy.

The cases of `json_cases.jsonl` have a prompt and a schema each. Four kinds of answers are measured: by schema and free,
each as the server drafts and decoded plainly. Run it as

    python tools/measure_json.py http://127.0.0.1:8000 --repeats 2
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

PLAIN = {"speculative": {"max_drafts": 0}}
CASES = Path(__file__).with_name("json_cases.jsonl")


def ask(url: str, body: dict[str, Any]) -> tuple[int, float]:
    """New tokens of an answer, and the seconds of their decoding."""
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as response:
        timings = json.load(response)["timings"]
    return timings["predicted_n"], timings["predicted_ms"] / 1e3


def main() -> None:
    """Print the tokens per second of every kind, and the quotient with free text that is decoded plainly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    options = parser.parse_args()
    cases = [json.loads(line) for line in CASES.read_text("utf-8").splitlines()]
    speeds = defaultdict[str, list[float]](list)
    for repeat in range(options.repeats + 1):
        for kind in ("schema", "schema, plain", "free", "free, plain"):
            answers = []
            for case in cases:
                body: dict[str, Any] = {"messages": [{"role": "user", "content": case["prompt"]}], "temperature": 0}
                body["max_tokens"] = options.max_new_tokens
                if kind.startswith("schema"):
                    form = {"name": "value", "schema": case["schema"]}
                    body["response_format"] = {"type": "json_schema", "json_schema": form}
                answers.append(ask(options.url, body | (PLAIN if kind.endswith("plain") else {})))
            if repeat:  # the first round fills the caches
                speeds[kind].append(sum(n for n, _ in answers) / sum(s for _, s in answers))
    base = median(speeds["free, plain"])
    for kind, found in speeds.items():
        print(f"{kind}: {median(found):.1f} tokens/s, {median(found) / base:.2f} times free, plain")


if __name__ == "__main__":
    main()
