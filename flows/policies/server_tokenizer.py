"""Comparison of a server's tokenizer and chat template with those of the run's model."""

from collections.abc import Mapping, Sequence

from rollmill.flows.policies.server_parity import Openings
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.serve.vllm_client import VllmClient

# Characters of a text that an error quotes before and after a difference.
QUOTED = 60

TEMPLATE_REMEDY = (
    "start it on the run's model folder, with --chat-template and --default-chat-template-kwargs as rollout.chat_template and "
    "rollout.chat_template_kwargs are, and without them where these are empty"
)
TOKENIZER_REMEDY = "start it with the tokenizer of the run's model folder"


async def check_tokenizer(openings: Openings, server: VllmClient) -> None:
    """Refuse a server that renders or tokenizes an opening, with the environment's tools, differently from this process.

    Requests carry token ids, so the server's template is not used. But a server with another one serves another model folder,
    or one template of the two is not what the model was trained with.

    Raises:
        ConfigError: it has another tokenizer or chat template; the text has the first difference.
        EpisodeError: the environment gives no opening to compare on, or the chat template refuses it.
    """
    (opening,) = await openings.first(1)
    tokenizer, messages = openings.tokenizer, opening.messages
    tools = normalize_tools(opening.tools)
    ours = tokenizer.encode(messages, tools).tolist()
    if tokenizer.has_template:
        theirs = await server.tokenize_chat([each.as_json() for each in messages], tools)
    else:
        theirs = await server.tokenize("".join(each.content for each in messages))
    if ours != theirs:
        text = "".join(tokenizer.pieces(ours))
        raise ConfigError(
            "serve.urls", server.url, describe_difference(text, ours, await server.detokenize(theirs), theirs)
        )


def normalize_tools(tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return tools as vLLM passes them to a chat template; none if one of them is not an OpenAI function schema.

    vLLM parses tools into a type with these fields and this order (0.32, ChatCompletionToolsParam and FunctionDefinition), and
    refuses others. Templates print the JSON as it is, so the same template writes other text for other fields.

    Example: {"function": {"parameters": {}, "name": "add"}} becomes {"type": "function", "function": {"name": "add",
    "description": None, "parameters": {}}}.
    """
    functions = [each for tool in tools if isinstance(each := tool.get("function"), Mapping)]
    if len(functions) < len(tools):
        return []
    return [
        {
            "type": "function",
            "function": {field: function.get(field) for field in ("name", "description", "parameters")}
            | ({"strict": function["strict"]} if function.get("strict") is not None else {}),
        }
        for function in functions
    ]


def describe_difference(
    our_text: str, our_ids: Sequence[int], their_text: str, their_ids: Sequence[int]
) -> str:
    """Return the first difference of two renderings of one conversation, and the remedy.

    The texts are compared, or, if they are equal, the token ids.

    Example: "its chat template is not the model's: after '<user>2+3=' it renders '<end>', not '</s>'; ..." for two templates.
    """
    if our_text != their_text:
        at = _first_difference(our_text, their_text)
        before = our_text[max(0, at - QUOTED) : at]
        theirs, ours = their_text[at : at + QUOTED], our_text[at : at + QUOTED]
        return (
            f"its chat template is not the model's: after {before!r} it renders {theirs!r}, not {ours!r}; "
            f"{TEMPLATE_REMEDY}"
        )
    at = _first_difference(our_ids, their_ids)
    theirs_there, ours_there = list(their_ids[at : at + 8]), list(our_ids[at : at + 8])
    return (
        f"its tokenizer is not the model's: from token {at} on it reads {our_text[:QUOTED]!r} as {theirs_there}, "
        f"not as {ours_there}; {TOKENIZER_REMEDY}"
    )


def _first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """Return the first index at which two sequences differ; the length of the shorter one if it begins the longer one."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
