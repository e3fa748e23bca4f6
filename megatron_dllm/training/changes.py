"""What a resumed run does otherwise than the one that saved the checkpoint, for people: nothing of it is wrong by itself."""
from __future__ import annotations

# Where a run's files lie, how it is spread and what it reports changes no number; the model is held to the checkpoint's elsewhere.
WITHOUT_EFFECT = ("# Model", "# Parallelism", "# Logging", "# Checkpoints")


def changed_flags(before: str, after: str) -> list[str]:
    """"--seed 1234 became 5" for each flag that two texts of an args.txt, which leave out what is not given, have with other values."""
    then, now = _values(before), _values(after)
    values = {flag: (then.get(flag, "none"), now.get(flag, "none")) for flag in {**then, **now}}
    return [f"{flag} {old} became {new}" for flag, (old, new) in values.items() if old != new]


def _values(text: str) -> dict[str, str]:
    values = {}
    for section in text.split("\n\n"):
        title, _, lines = section.partition("\n")
        for line in lines.splitlines() if title not in WITHOUT_EFFECT else ():
            flag, _, value = line.partition(" ")
            is_off = flag.startswith("--no-") and not value
            values["--" + flag.removeprefix("--no-") if is_off else flag] = "off" if is_off else value or "on"
    return values
