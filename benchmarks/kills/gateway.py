"""A TCP gateway before a server: the part of an S3 store that can be killed while its objects remain.

`python -m benchmarks.kills.gateway PORT TARGET_PORT`; it passes bytes on and keeps none.
"""

import asyncio
import sys
from contextlib import suppress

HOST, CHUNK_BYTES = "127.0.0.1", 1 << 18


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection until it ends."""
    with suppress(ConnectionError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    with suppress(ConnectionError):
        writer.close()


async def serve(port: int, target_port: int) -> None:
    """Accept connections until killed."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection(HOST, target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pass_on(reader, requests), pass_on(answers, writer))

    server = await asyncio.start_server(connect, HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
