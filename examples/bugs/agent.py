"""The smallest command-line agent: one tool, bash, in a loop; only the standard library.

    agent.py QUESTION        OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name its model

- It ends when the model answers without a call, or after MAX_TURNS.
"""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

MAX_TURNS = 20
COMMAND_S = 30
MAX_CHARS = 8000
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the working directory; its output and exit code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's next message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [BASH]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def bash(arguments: str) -> str:
    """Run a command; return its output and exit code."""
    try:
        command = json.loads(arguments)["command"]
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return f"error: {error}"
    return f"{(done.stdout + done.stderr)[-MAX_CHARS:]}\nexit code {done.returncode}"


def main(question: str) -> None:
    """Work on the question until the model is done."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            print(message.get("content") or "")
            return
        for call in message["tool_calls"]:
            result = bash(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


if __name__ == "__main__":
    main(sys.argv[1])
