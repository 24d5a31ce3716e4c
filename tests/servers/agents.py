"""Programs that know a base URL and a key: each is a script that `python -c` runs, with the problem on its standard input."""

CHAT = """
import json, sys
from openai import OpenAI
client, messages = OpenAI(), json.load(sys.stdin)
said = client.chat.completions.create(model="any", messages=messages, temperature=0.1, max_tokens=9).choices[0]
messages += [{"role": "assistant", "content": said.message.content}, {"role": "user", "content": "+1?"}]
print(client.chat.completions.create(model="any", messages=messages).choices[0].message.content)
"""

CHAT_STREAM = """
import json, sys
from openai import OpenAI
client, messages = OpenAI(), json.load(sys.stdin)
def ask():
    parts = client.chat.completions.create(model="any", messages=messages, stream=True)
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
messages += [{"role": "assistant", "content": ask()}, {"role": "user", "content": "+1?"}]
print(ask())
"""

RESPONSES = """
import json, sys
from openai import OpenAI
client, messages = OpenAI(), json.load(sys.stdin)
first = client.responses.create(model="any", input=messages)
messages += [*first.output, {"role": "user", "content": "+1?"}]
print(client.responses.create(model="any", input=messages).output_text)
"""

RESPONSES_BY_ID = """
import json, sys
from openai import OpenAI
client, messages = OpenAI(), json.load(sys.stdin)
first = client.responses.create(model="any", input=messages)
print(client.responses.create(model="any", input="+1?", previous_response_id=first.id).output_text)
"""

RESPONSES_STREAM = """
import json, sys
from openai import OpenAI
client, messages = OpenAI(), json.load(sys.stdin)
def ask():
    with client.responses.stream(model="any", input=messages) as stream:
        return stream.get_final_response()
messages += [*ask().output, {"role": "user", "content": "+1?"}]
print(ask().output_text)
"""

MESSAGES = """
import json, sys
from anthropic import Anthropic
client, messages = Anthropic(), json.load(sys.stdin)
said = client.messages.create(model="any", max_tokens=9, messages=messages)
messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "+1?"}]
print(client.messages.create(model="any", max_tokens=9, messages=messages).content[0].text)
"""

MESSAGES_STREAM = """
import json, sys
from anthropic import Anthropic
client, messages = Anthropic(), json.load(sys.stdin)
def ask():
    with client.messages.stream(model="any", max_tokens=9, messages=messages) as stream:
        return stream.get_final_message()
messages += [{"role": "assistant", "content": ask().content}, {"role": "user", "content": "+1?"}]
print(ask().content[0].text)
"""

TEXT_AGENTS = {
    "chat": CHAT,
    "chat, streamed": CHAT_STREAM,
    "responses": RESPONSES,
    "responses by id": RESPONSES_BY_ID,
    "responses, streamed": RESPONSES_STREAM,
    "messages": MESSAGES,
    "messages, streamed": MESSAGES_STREAM,
}
"""Each asks the problem, then asks for one more."""

FUNCTION = """{"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}"""

CHAT_TOOLS = f"""
import json, sys
from openai import OpenAI
client, messages = OpenAI(), json.load(sys.stdin)
tools = [{{"type": "function", "function": {FUNCTION}}}]
said = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message
call = said.tool_calls[0]
assert (call.function.name, json.loads(call.function.arguments)) == ("add", {{"a": 47, "b": 38}}), call
messages += [said, {{"role": "tool", "tool_call_id": call.id, "content": "85"}}]
print(client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message.content)
"""

RESPONSES_TOOLS = f"""
import json, sys
from openai import OpenAI
client, messages = OpenAI(), json.load(sys.stdin)
tools = [{{"type": "function", "strict": False, **{FUNCTION}}}]
def ask():
    with client.responses.stream(model="any", input=messages, tools=tools) as stream:
        return stream.get_final_response()
said = ask()
call = said.output[0]
assert (call.name, json.loads(call.arguments)) == ("add", {{"a": 47, "b": 38}}), call
messages += [*said.output, {{"type": "function_call_output", "call_id": call.call_id, "output": "85"}}]
print(ask().output_text)
"""

MESSAGES_TOOLS = f"""
import json, sys
from anthropic import Anthropic
client, messages = Anthropic(), json.load(sys.stdin)
function = {FUNCTION}
function["input_schema"] = function.pop("parameters")
def ask():
    with client.messages.stream(model="any", max_tokens=9, messages=messages, tools=[function]) as stream:
        return stream.get_final_message()
said = ask()
call = said.content[0]
assert (call.name, call.input, said.stop_reason) == ("add", {{"a": 47, "b": 38}}, "tool_use"), said
answer = {{"type": "tool_result", "tool_use_id": call.id, "content": [{{"type": "text", "text": "85"}}]}}
messages += [{{"role": "assistant", "content": said.content}}, {{"role": "user", "content": [answer]}}]
print(ask().content[0].text)
"""

TOOL_AGENTS = {"chat": CHAT_TOOLS, "responses": RESPONSES_TOOLS, "messages": MESSAGES_TOOLS}
"""Each offers the tool `add`, answers the policy's call with 85, and asks again."""
