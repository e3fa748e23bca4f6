"""What a resumed run does otherwise than the one that saved the checkpoint, for people: nothing of it is wrong by itself."""
from __future__ import annotations

# Where a run's files lie, how it is spread and what it reports changes no number; the model is held to the checkpoint's elsewhere.
WITHOUT_EFFECT = ("# Model", "# Parallelism", "# Logging", "# Checkpoints")


def changed_flags(before: str, after: str) -> list[str]:
    """"--seed 1234 became 5" for each flag that both texts of an args.txt have with different values."""
    then, now = _values(before), _values(after)
    return [f"{flag} {then[flag]} became {value}" for flag, value in now.items() if then.get(flag, value) != value]


def _values(text: str) -> dict[str, str]:
    values = {}
    for section in text.split("\n\n"):
        title, _, lines = section.partition("\n")
        for line in lines.splitlines() if title not in WITHOUT_EFFECT else ():
            flag, _, value = line.partition(" ")
            is_off = flag.startswith("--no-") and not value
            values["--" + flag.removeprefix("--no-") if is_off else flag] = "off" if is_off else value or "on"
    return values
