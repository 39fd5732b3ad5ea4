"""The reward: called once per answer, with the text and the row of the data it answers."""


def score(completion: str, row: dict) -> float:
    """1.0 for the right answer, a little for one of the right length; anything from numbers to None (not applicable) may be returned."""
    said, wanted = completion.strip(), str(row["answer"])
    if said == wanted:
        return 1.0
    return 0.1 if len(said) == len(wanted) else 0.0
