"""The README's first answer is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from command_helpers import in_process_of_its_own

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_sample_is_what_the_command_prints(tmp_path: Path) -> None:
    command, sample = re.findall(r"^\$ (advise --model flux .*)\n((?:.*\n)*?)\.\.\.$", README, re.MULTILINE)[0]
    done = in_process_of_its_own(shlex.split(command)[1:], tmp_path, COLUMNS="100")
    assert done.status == 0
    lines = sample.splitlines()
    assert [line.rstrip() for line in done.out.splitlines()][: len(lines)] == lines
