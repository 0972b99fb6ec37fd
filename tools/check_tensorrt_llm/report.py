"""What the check found, in sections: on the terminal, and in one file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.markdown import markdown

FORMATS = (".json", ".md")


@dataclass(frozen=True)
class Section:
    """One question.

    Attributes:
        title: what was asked.
        columns: of the table.
        rows: what was found.
        problems: what is not as the adapter needs it.
        remark: how to read the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    problems: tuple[str, ...] = ()
    remark: str = ""

    def print(self, console: Console) -> None:
        """As a table."""
        table = Table(*self.columns, title=self.title, caption=self.remark or None)
        for column in table.columns:
            column.overflow = "fold"
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for problem in self.problems:
            console.print(f"[red]problem[/red]  {problem}")


@dataclass
class Report:
    """All sections, in order.

    Attributes:
        version: of the library.
        notes: lines beside the sections.
    """

    version: str
    sections: list[Section] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, section: Section, console: Console) -> None:
        """Appends and prints it."""
        self.sections.append(section)
        section.print(console)

    def note(self, line: str, console: Console) -> None:
        """Appends and prints a line."""
        self.notes.append(line)
        console.print(line)

    @property
    def problems(self) -> list[str]:
        """Of all sections."""
        return [problem for section in self.sections for problem in section.problems]

    def write(self, path: Path) -> None:
        """JSON or Markdown, by the name of the file."""
        text = json.dumps(asdict(self), indent=1) if path.suffix == FORMATS[0] else self._markdown()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")

    def _markdown(self) -> str:
        parts = [f"# TensorRT-LLM {self.version} beside the table of facts", *self.notes]
        for section in self.sections:
            parts += [f"## {section.title}", markdown(section.columns, section.rows), section.remark]
            parts += [f"**Problem:** {problem}" for problem in section.problems]
        return "\n\n".join(part for part in parts if part)
