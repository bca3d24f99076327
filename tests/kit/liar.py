"""A server that answers with the bytes that a test hands it: not HTTP, cut, slow, endless, or of another range."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import sleep

#: The bytes of an answer to (path, first and last byte that were asked or None), in the pieces that are sent.
Lie = Callable[[str, tuple[int, int] | None], Iterable[bytes]]


class Liar:
    """The address of a server, and what it answers with next."""

    def __init__(self, address: str) -> None:
        """Answer nothing until `lie` is set."""
        self.address = address
        self.asked: list[str] = []
        self.lie: Lie = lambda path, part: ()


@contextmanager
def lying(pause: float = 0.02) -> Iterator[Liar]:
    """Serve on a free port; every piece after the first waits `pause` seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        liar = Liar(f"http://127.0.0.1:{listening.getsockname()[1]}")

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                asked = b""
                while b"\r\n\r\n" not in asked and (more := connection.recv(1 << 16)):
                    asked += more
                path = asked.split(b" ")[1].decode()
                liar.asked.append(path)
                part = re.search(rb"Range: bytes=(\d+)-(\d+)", asked)
                for at, piece in enumerate(liar.lie(path, (int(part[1]), int(part[2])) if part else None)):
                    sleep(pause if at else 0)
                    connection.sendall(piece)

        def serve() -> None:
            with suppress(OSError):  # closed
                while True:
                    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield liar
        listening.shutdown(socket.SHUT_RDWR)
