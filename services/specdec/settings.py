"""How every service reads its settings: a flag beats an environment variable, which beats the file, then the default.

Built only in a command's `main`, frozen afterwards. The file (`--config FILE` or SPECDEC_CONFIG) is YAML with one
section a service:

    router:
      port: 8000
    draft:
      drafter: ngram
"""

import os
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from specdec.errors import SettingsError

SECTIONS = ("router", "verifier", "draft", "up", "demo", "bench", "bench draft", "bench edge", "check", "simulate")


class _Environment(EnvSettingsSource):
    """Variables; a list may be written with commas, as on the command line."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return [part.strip() for part in str(value).split(",")]


class Settings(BaseSettings):
    """Base of each service's settings; a subclass names its `section` and its environment prefix."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", cli_kebab_case=True, cli_hide_none_type=True)

    section: ClassVar[str]
    config_file: ClassVar[Path | None] = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources: list[PydanticBaseSettingsSource] = [init_settings, _Environment(settings_cls)]
        if cls.config_file is not None:
            sources.append(YamlConfigSettingsSource(settings_cls, cls.config_file, yaml_config_section=cls.section))
        return tuple(sources)

    @classmethod
    def load(cls, argv: list[str]) -> Self:
        """Settings from a command line's arguments, the environment and the file.

        Raises SettingsError naming each bad setting. `--help` prints and exits 0, an unknown flag exits 2.
        """
        argv, config_file = _take_config(argv)
        if config_file is not None and cls.section not in _sections(config_file):
            config_file = None  # it is about other services
        kind: type[Self] = type(cls.__name__, (cls,), {"config_file": config_file, "__doc__": cls.__doc__})
        prefix = cls.model_config["env_prefix"]
        source: CliSettingsSource[Any] = CliSettingsSource(
            kind, cli_prog_name=f"specdec {cls.section}", cli_exit_on_error=True
        )
        source.root_parser.epilog = (
            f"Every flag can be set as {prefix}<NAME> in the environment (--a-b: {prefix}A_B) or in the YAML "
            f"file that --config FILE or SPECDEC_CONFIG names, under '{cls.section}:'."
        )
        try:
            return kind(_cli_settings_source=source(args=argv))
        except ValidationError as error:
            raise SettingsError(_explain(error, prefix, f"{config_file}: {cls.section}")) from None
        except (AttributeError, OSError, TypeError, ValueError) as error:
            raise SettingsError(f"{config_file or 'settings'}: {error}") from error


def _take_config(argv: list[str]) -> tuple[list[str], Path | None]:
    rest, found = [], os.environ.get("SPECDEC_CONFIG")
    words = iter(argv)
    for word in words:
        if word == "--config":
            found = next(words, None)
            if found is None:
                raise SettingsError("--config needs a file name")
        elif word.startswith("--config="):
            found = word.partition("=")[2]
        else:
            rest.append(word)
    return rest, Path(found) if found else None


def _sections(path: Path) -> list[str]:
    """The sections of a settings file. Raises SettingsError for a file without any, or with one that no service has."""
    if not path.is_file():
        raise SettingsError(f"--config, SPECDEC_CONFIG: there is no file {path}")
    try:
        content = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from error
    if not isinstance(content, dict) or not content:
        raise SettingsError(f"{path}: there is no section; write one for each service, such as 'router:'")
    if unknown := [name for name in content if name not in SECTIONS]:
        raise SettingsError(f"{path}: there is no service {unknown[0]!r}; the sections are {', '.join(SECTIONS)}")
    return list(content)


def _explain(error: ValidationError, prefix: str, section: str) -> str:
    lines = []
    for fault in error.errors():
        name = str(fault["loc"][0])
        flag = "--" + name.replace("_", "-")
        got = "" if fault["type"] == "missing" else f" (got {fault['input']!r})"
        if fault["type"] == "extra_forbidden":  # only the file can have one
            lines.append(f"{section}.{name}: there is no such setting{got}")
        else:
            lines.append(f"{flag}, {prefix}{name.upper()}: {fault['msg']}{got}")
    return "\n".join(lines)
