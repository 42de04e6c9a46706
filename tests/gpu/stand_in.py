"""msgspec where there is none: as much of it as the engine needs to run, not to write files or talk through pipes."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any, ClassVar, NoReturn, dataclass_transform


@dataclass_transform()
class Struct:
    """A dataclass made by subclassing, with the options of ``msgspec.Struct`` as keywords of the class.

    Fields, defaults, order, equality and hashing are msgspec's; a mutable default is copied for each instance. Writing
    to a frozen one is not refused: a check there would cost what msgspec does not cost, on every token of a step.
    """

    __struct_frozen__: ClassVar[bool] = False
    __struct_fields__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, frozen: bool | None = None, kw_only: bool = False, **unused: Any) -> None:
        super().__init_subclass__()
        if frozen is not None:
            cls.__struct_frozen__ = frozen
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict | set):
                setattr(cls, name, dataclasses.field(default_factory=default.copy))
        dataclasses.dataclass(kw_only=kw_only, unsafe_hash=cls.__struct_frozen__)(cls)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]


class MsgspecError(Exception):
    pass


class DecodeError(MsgspecError):
    pass


class ValidationError(DecodeError):
    pass


class Decoder:
    """Made at import by modules that read files; it reads none."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def decode(self, data: object) -> NoReturn:
        raise _missing()


def _missing() -> NotImplementedError:
    return NotImplementedError("reading and writing files needs msgspec, which is not installed")


def _refuse(*arguments: Any, **options: Any) -> NoReturn:
    raise _missing()


def install_where_missing() -> bool:
    """Puts the stand-in where ``import msgspec`` finds it, unless the library is installed; whether it did."""
    if "msgspec" in sys.modules or importlib.util.find_spec("msgspec") is not None:
        return False
    package, structs, json = ModuleType("msgspec"), ModuleType("msgspec.structs"), ModuleType("msgspec.json")
    vars(structs).update(replace=dataclasses.replace, asdict=dataclasses.asdict, fields=dataclasses.fields)
    vars(json).update(Decoder=Decoder, Encoder=Decoder, decode=_refuse, encode=_refuse)
    vars(package).update(
        __path__=[],
        Struct=Struct,
        field=dataclasses.field,
        convert=_refuse,
        MsgspecError=MsgspecError,
        DecodeError=DecodeError,
        ValidationError=ValidationError,
        structs=structs,
        json=json,
    )
    sys.modules.update({"msgspec": package, "msgspec.structs": structs, "msgspec.json": json})
    return True
