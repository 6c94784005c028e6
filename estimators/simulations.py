"""Results of a profile's simulations, kept on disk beside it: steps (`Replay`) and what the allocator reserved for them (`Estimator`).

A file is used by the code that wrote it only, and for the tape that its results are of; else they are made anew. Its first line says
both and holds a checksum of the second, which holds the results, as JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from probes import store
from probes.tape import Tape

MOST_STEPS = 512
"""Steps that are kept, the latest ones. A model has about 30 schedules; with numbers of swapped blocks, a few times as many."""
MOST_RESERVED = 2048


@dataclass
class Simulations:
    """What is known of one profile."""

    name: str
    """Of the file."""
    made_of: str
    """What made the results, and of which tape."""
    reserved: dict[str, Any] = field(default_factory=dict)
    """Bytes reserved by what was simulated; with a cap, and whether memory ran out."""
    steps: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None
    """What was wrong with the file, until it is written again."""

    def __post_init__(self) -> None:
        self._saved = self._counts

    @classmethod
    def read(cls, profile: str, tape: Tape) -> Simulations:
        """Those of a profile by its key (`store.key`); none where there is no file, or one that other code or another tape made.

        A damaged file is said in `trouble`.
        """
        found = cls(f"{profile}.simulated.jsonl", f"{store.code_digest('estimators')} {tape.digest()}")
        path = store.cache_folder() / found.name
        try:
            head, _, body = store.read_file(path).partition(b"\n")
            header = json.loads(head)
            if hashlib.sha256(body).hexdigest() != header["checksum"]:
                raise ValueError("the checksum differs")
            if header["made_of"] == found.made_of:
                content = json.loads(body)
                reserved, steps = content["reserved"], content["steps"]
                if not isinstance(steps, dict) or not all(_is_reserved(v) for v in reserved.values()):
                    raise ValueError("not the results of simulations")
                found.reserved, found.steps = reserved, steps
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            found.trouble = f"the stored file {path} is not readable; it is made anew"
        found._saved = found._counts
        return found

    @property
    def _counts(self) -> tuple[int, int]:
        """Results are only ever added."""
        return len(self.reserved), len(self.steps)

    def save(self) -> None:
        """Writes the file where there is something new; silently does without when it cannot be written."""
        if self._counts == self._saved and self.trouble is None:
            return
        for results, most in ((self.reserved, MOST_RESERVED), (self.steps, MOST_STEPS)):
            for name in list(itertools.islice(results, max(0, len(results) - most))):
                del results[name]
        body = json.dumps({"reserved": self.reserved, "steps": self.steps}, separators=(",", ":")).encode()
        head = json.dumps({"made_of": self.made_of, "checksum": hashlib.sha256(body).hexdigest()}).encode()
        store.write_quietly(self.name, head + b"\n" + body)
        self._saved, self.trouble = self._counts, None


def _is_reserved(value: Any) -> bool:
    """Bytes, or with a cap [bytes, whether memory ran out]."""
    if isinstance(value, list):
        return len(value) == 2 and type(value[1]) is bool and _is_reserved(value[0])
    return type(value) is int and value > 0
