"""Text of any origin in markdown, where it is read as it is: it makes no heading, link, picture, tag or end of a block."""

import re
import string

from flows.looking.view import counted, visible

JOINER = "\u2060"
"""Has no width: where it stands after an ampersand, the older of Prefect's UIs does not read `&lt;` as `<` in code."""
MOST_INLINE = 200
"""Characters of a name or an error that are shown."""
MOST_BLOCK = 1500
"""Characters of a message that are shown: its first and its last."""


def inline(text: object, most: int = MOST_INLINE) -> str:
    r"""Text on one line, in a table's cell too; before whatever markdown or HTML could read stands a backslash.

    Example: `<b>` becomes `\<b\>`, which a page shows as it was.
    """
    line = str(text)
    shown = visible(" ".join(line[: most + 1].split()))
    escaped = re.sub(f"[{re.escape(string.punctuation)}]", r"\\\g<0>", shown[:most])
    return f"{escaped}…" if len(line) > most else escaped


def block(text: str, most: int = MOST_BLOCK) -> list[str]:
    """Text as lines of a block of code, whose fence is longer than any in it; of long text the beginning and the end."""
    shown = re.sub(r"&(?=#?\w+;)", f"&{JOINER}", visible(shortened(text, most)))
    runs = [len(run) for run in re.findall(r"`+", shown)]
    fence = "`" * max(3, 1 + max(runs, default=0))
    return [f"{fence}text", *shown.split("\n"), fence]


def shortened(text: str, most: int) -> str:
    """Its beginning and its end, and between them how much is not shown; the text itself when it is short."""
    if len(text) <= most:
        return text
    head, tail = text[: most * 2 // 3], text[-(most // 3) :]
    return f"{head}\n[… {counted(len(text) - len(head) - len(tail), 'character')} more …]\n{tail}"
