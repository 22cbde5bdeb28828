"""What data lets you choose by name. No numpy: settings of runs name the same choices."""

from __future__ import annotations

from typing import Literal

VocabularyName = Literal["ascii", "gpt2"]
CharacterRule = Literal["drop", "fold"]
"""What to do with characters outside the vocabulary: drop the document, or fold them to ASCII."""
