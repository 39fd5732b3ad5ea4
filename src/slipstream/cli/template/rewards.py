"""The reward: called once per answer, with the text and the row of the data that it answers."""


def score(completion: str, row: dict) -> float:
    """1.0 for the right answer, up to 0.2 for digits in the right place. A number, or None where no reward applies."""
    said, wanted = completion.strip(), str(row["answer"])
    if said == wanted:
        return 1.0
    return 0.2 * sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)
