"""An agent with OpenAI's client: it asks the policy the problem, then to check its answer, and prints the second answer."""

import json
import sys

from openai import OpenAI

client = OpenAI()
messages = json.load(sys.stdin)
for question in (None, "\nagain: "):
    if question:
        messages.append({"role": "user", "content": question + messages[0]["content"]})
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages.append({"role": "assistant", "content": said.content})
print(messages[-1]["content"])
