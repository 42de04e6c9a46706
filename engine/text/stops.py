"""Stop strings in text that arrives in pieces."""

from __future__ import annotations


class StopStrings:
    """Finds the first of several strings in a growing text and cuts the text before it.

    The one that is complete first wins; of two complete at the same character, the longer. So the result does not
    depend on how the text is cut into pieces. Text is held back only where it may be the beginning of a stop string.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string was found; once found, all later text is dropped."""
        if self._stopped:
            return "", True
        if not self._stop:
            return text, False
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self._stopped = True
            self._held = ""
            return text[: min(found)[1]], True
        keep = self._possible_beginning(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """What was held back, at an end that no stop string made."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Where the longest end of ``text`` that begins a stop string starts; its length where there is none."""
        earliest = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), earliest)
            while start >= 0:
                if stop.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(stop[0], start + 1, earliest)
        return earliest
