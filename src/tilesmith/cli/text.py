"""Real text, and the small byte-pair encoding that turns it into tokens."""

from __future__ import annotations

import heapq
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

WORDS = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


def python_reference() -> str:
    """The language reference that `help()` prints: about 700 kB that come with CPython."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def read(path: Path) -> str:
    """A UTF-8 file. Raises OSError where it cannot be read, ValueError when it is too short to train on."""
    text = _content(path, "a text file")
    if len(text) < 20_000:
        raise ValueError(f"{path} has {len(text)} characters; the demo needs at least 20,000 to train on")
    return text


def read_all(paths: Sequence[Path]) -> str:
    """UTF-8 files, one after the other. Raises OSError where one cannot be read, ValueError where one is empty."""
    texts = [_content(path, "text files") for path in paths]
    for path, text in zip(paths, texts):
        if not text.strip():
            raise ValueError(f"{path} holds no text")
    return "\n".join(texts)


def _content(path: Path, wanted: str) -> str:
    """A file's text. wanted: what to give in place of a path that is none."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give {wanted}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give {wanted}")
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise OSError(f"{path} cannot be read: {problem.strerror}") from problem


class BytePairs:
    """Byte-pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909) over the bytes of words.

    tokens: the bytes of each token; the first 256 are the single bytes.
    """

    def __init__(self, merges: Iterable[tuple[int, int]] = ()):
        self.tokens = [bytes([i]) for i in range(256)]
        self._pairs: list[tuple[int, int]] = []
        self._ids: dict[tuple[int, int], int] = {}
        self._words: dict[str, list[int]] = {}
        for pair in merges:
            self._add(pair)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def train(cls, text: str, size: int, progress: Callable[[int], None] = lambda done: None) -> BytePairs:
        """Merge the most frequent neighbours until there are `size` tokens, or no pair occurs twice."""
        made = cls()
        counts = Counter(WORDS.findall(text))
        words = [list(word.encode()) for word in counts]
        times = list(counts.values())
        pairs: Counter[tuple[int, int]] = Counter()
        places: dict[tuple[int, int], set[int]] = defaultdict(set)
        for i, word in enumerate(words):
            for pair in itertools.pairwise(word):
                pairs[pair] += times[i]
                places[pair].add(i)
        queue = [(-n, pair) for pair, n in pairs.items()]
        heapq.heapify(queue)
        while len(made) < size and queue:
            n, pair = heapq.heappop(queue)
            if pairs[pair] != -n:  # counted anew since it was queued
                if pairs[pair] > 1:
                    heapq.heappush(queue, (-pairs[pair], pair))
                continue
            if n > -2:
                break
            token = made._add(pair)
            touched = set()
            for i in places.pop(pair):
                before = Counter(zip(words[i], words[i][1:]))
                words[i] = _merge(words[i], pair, token)
                after = Counter(zip(words[i], words[i][1:]))
                for changed in before.keys() | after.keys():
                    if before[changed] != after[changed]:
                        pairs[changed] += (after[changed] - before[changed]) * times[i]
                        touched.add(changed)
                    if after[changed]:
                        places[changed].add(i)
            for changed in touched:
                if pairs[changed] > 1:
                    heapq.heappush(queue, (-pairs[changed], changed))
            progress(len(made))
        return made

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; decoding them gives it back."""
        out: list[int] = []
        for word in WORDS.findall(text):
            if word not in self._words:
                self._words[word] = self._encode_word(list(word.encode()))
            out += self._words[word]
        return out

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.tokens[i] for i in ids).decode(errors="replace")

    def save(self, path: Path) -> None:
        """Write the merges, from which everything else follows, as JSON."""
        path.write_text(json.dumps({"merges": self._pairs}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> BytePairs:
        """What `save` wrote."""
        return cls(map(tuple, json.loads(path.read_text(encoding="utf-8"))["merges"]))

    def _add(self, pair: tuple[int, int]) -> int:
        self.tokens.append(self.tokens[pair[0]] + self.tokens[pair[1]])
        self._pairs.append(pair)
        self._ids[pair] = len(self.tokens) - 1
        return len(self.tokens) - 1

    def _encode_word(self, word: list[int]) -> list[int]:
        while True:
            best = min((self._ids[p] for p in itertools.pairwise(word) if p in self._ids), default=None)
            if best is None:
                return word
            word = _merge(word, self._pairs[best - 256], best)


def _merge(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
    merged, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(token)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged
