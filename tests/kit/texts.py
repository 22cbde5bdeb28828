"""Documents, and folders of tokens made of them."""

import random

SMALL = {"processes": 1, "chunk_bytes": 2000}


def documents(count=200, seed=0):
    rng = random.Random(seed)
    letters = "abcdefgh ijklmnop\nqrst,.XYZ"
    made = ["".join(rng.choices(letters, k=rng.randrange(20, 400))) for _ in range(count)]
    # No newlines at the ends, none doubled, so that what is read is what is written.
    return [f"{i}: " + text.replace("\n\n", "\n").strip("\n") + "." for i, text in enumerate(made)]


def save(path, texts):
    path.write_text("\n\n\n".join(texts), encoding="utf-8")
    return path


def encoded(texts):
    """By hand: newline is 0, a space 1, and every document ends with a newline."""
    joined = "".join(text + "\n" for text in texts)
    return [0 if c == "\n" else ord(c) - 31 for c in joined]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
