"""Named system prompts and sampling settings: some that come with the program, and the user's own in the chat file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from app.chat.conversation import DEFAULT_CHAT_PARAMS, ChatError, sound
from app.translation import mark, tr
from engine.config import DEFAULT_CHAT_MAX_TOKENS
from engine.request import SamplingParams

PresetKind = Literal["system", "sampling"]


@dataclass(frozen=True, slots=True)
class Preset:
    name: str
    """Of a built-in one: to be shown through ``tr``."""
    kind: PresetKind
    text: str = ""
    """Of kind ``system``: the prompt."""
    params: SamplingParams | None = None
    """Of kind ``sampling``."""
    built_in: bool = False


def _system(name: str, text: str) -> Preset:
    return Preset(name, "system", text=text, built_in=True)


def _sampling(name: str, params: SamplingParams) -> Preset:
    return Preset(name, "sampling", params=params, built_in=True)


_LENGTH = DEFAULT_CHAT_MAX_TOKENS
BUILT_IN = (
    _system(mark("Plain"), ""),
    _system(
        mark("Brief"),
        "Answer in as few words as the question allows. No introduction, no summary, no repeated question.",
    ),
    _system(
        mark("Teacher"),
        "You are a patient teacher. Explain step by step, with one small example, and say which word of the field "
        "names each idea.",
    ),
    _system(
        mark("Programmer"),
        "You are an experienced programmer. Give complete, runnable code in fenced blocks with the language named, and "
        "below it only what a reader could not see from the code.",
    ),
    _system(
        mark("Editor"),
        "You are a careful editor. Correct the text that you are given, keep its meaning and voice, and answer with "
        "the corrected text only.",
    ),
    _sampling(mark("Balanced"), DEFAULT_CHAT_PARAMS),
    _sampling(mark("Exact"), SamplingParams(temperature=0.0, max_tokens=_LENGTH)),
    _sampling(mark("Careful"), SamplingParams(temperature=0.3, top_p=0.9, max_tokens=_LENGTH)),
    _sampling(mark("Inventive"), SamplingParams(temperature=1.0, min_p=0.05, max_tokens=_LENGTH)),
    _sampling(
        mark("Less repetition"),
        SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, max_tokens=_LENGTH),
    ),
)


def own_preset(preset: Preset) -> Preset:
    """The preset as it is kept for the user. Raises :class:`ChatError`."""
    name = " ".join(sound(preset.name).split())
    if not name:
        raise ChatError(tr("The preset needs a name."))
    if any(name.casefold() in (each.name.casefold(), tr(each.name).casefold()) for each in BUILT_IN):
        raise ChatError(tr("“{name}” comes with the program; choose another name.", name=name))
    return replace(preset, name=name, text=sound(preset.text), built_in=False)


def check_own(preset: Preset) -> None:
    """Raises :class:`ChatError` for one that comes with the program."""
    if preset.built_in:
        raise ChatError(tr("“{name}” comes with the program and stays.", name=tr(preset.name)))
