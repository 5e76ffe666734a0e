"""Values that methods return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from .errors import field

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """A piece of output. With a terminal all of it is stdout."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True)
class Exit:
    """How a process ended. The code is a shell's: 128 + n for signal n, 126 and 127 if it could not start."""

    code: int
    signal: int = 0
    timed_out: bool = False
    not_started: str = ""
    cpu_ms: float = 0.0


def exit_of(doc: dict[str, Any]) -> Exit:
    return Exit(
        field(doc, "exit_code", int), field({"signal": 0, **doc}, "signal", int), bool(doc.get("timed_out")), str(doc.get("not_started") or ""),
        float(field({"cpu_ms": 0, **doc}, "cpu_ms", (int, float))),
    )


@dataclass(frozen=True)
class Completed:
    """A command that has ended, and its output."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    truncated: bool = False

    @property
    def code(self) -> int:
        return self.exit.code

    @property
    def text(self) -> str:
        """Standard output as text."""
        return self.stdout.decode(errors="replace")


@dataclass(frozen=True)
class Versioned(Generic[T]):
    """A value, and its version for a change that must not overwrite another's."""

    value: T
    etag: str


@dataclass(frozen=True)
class Lineage:
    """The relatives of a sandbox that still exist: from the parent up, and the direct children."""

    ancestors: list[str]
    children: list[str]
