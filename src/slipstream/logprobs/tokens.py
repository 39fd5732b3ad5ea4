"""Whether two models speak of the same tokens. No torch: tokenizers are mappings from token to id here."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import ModelError


def check_same_tokens(key: str, name: str, theirs: Mapping[str, int], ours: Mapping[str, int]) -> None:
    """ModelError that names the first difference of the vocabularies (token -> id) of a frozen model and of the one that learns.

    >>> check_same_tokens("loss.teacher", "big", {"a": 0, "b": 1}, {"a": 0, "b": 1})
    """
    if theirs == ours:
        return
    at_ours, at_theirs = _by_id(ours), _by_id(theirs)
    first = min(index for index in at_ours.keys() | at_theirs.keys() if at_ours.get(index) != at_theirs.get(index))
    raise ModelError(
        f"{key} = '{name}': its tokenizer is not that of the model that learns ({len(theirs):,} tokens there, {len(ours):,} here; the "
        f"first difference is token id {first}: {_shown(at_theirs.get(first))} there, {_shown(at_ours.get(first))} here). Logprobs of "
        "sampled tokens mean something only under the same vocabulary: take a model of the same family, with the same tokenizer files"
    )


def _by_id(vocabulary: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    out: dict[int, list[str]] = {}
    for token, index in vocabulary.items():
        out.setdefault(index, []).append(token)
    return {index: tuple(sorted(tokens)) for index, tokens in out.items()}


def _shown(tokens: tuple[str, ...] | None) -> str:
    return "none" if tokens is None else " and ".join(map(repr, tokens))
