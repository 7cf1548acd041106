import math
from collections import Counter
from collections.abc import Sequence


def estimated_arpa(sentences: Sequence[Sequence[str]], order: int) -> str:
    """Returns the text of an ARPA file, estimated with absolute discounting of 0.5 and back-off to shorter histories.

    After each history, the probabilities of all words, the unknown word and the end add up to 1.
    """
    padded = [["<s>", *words, "</s>"] for words in sentences]
    counts: list[Counter[tuple[str, ...]]] = [
        Counter(tuple(words[i : i + n]) for words in padded for i in range(len(words) - n + 1))
        for n in range(1, order + 1)
    ]
    del counts[0]["<s>",]
    vocabulary = sorted({word for (word,) in counts[0]} | {"<unk>"})
    total = sum(counts[0].values()) + len(vocabulary)
    probabilities = {(word,): (counts[0][word,] + 1) / total for word in vocabulary}

    def probability(history: tuple[str, ...], word: str) -> float:
        if (*history, word) in probabilities:
            return probabilities[*history, word]
        return backoffs.get(history, 1.0) * probability(history[1:], word)

    backoffs: dict[tuple[str, ...], float] = {}
    for longer in counts[1:]:
        for history in {words[:-1] for words in longer}:
            seen = {words[-1]: count for words, count in longer.items() if words[:-1] == history}
            mass = sum(seen.values())
            free = 0.5 * len(seen) / mass
            backoffs[history] = free / (1 - sum(probability(history[1:], word) for word in seen))
            discounted = {(*history, word): (count - 0.5) / mass for word, count in seen.items()}
            probabilities.update(discounted)
    probabilities["<s>",] = 1e-99
    lines = ["\\data\\", *(f"ngram {n}={sum(len(words) == n for words in probabilities)}" for n in range(1, order + 1))]
    for n in range(1, order + 1):
        lines += ["", f"\\{n}-grams:"]
        for words in sorted(words for words in probabilities if len(words) == n):
            weight = f"\t{math.log10(backoffs[words])!r}" if words in backoffs else ""
            lines.append(f"{math.log10(probabilities[words])!r}\t{' '.join(words)}{weight}")
    return "\n".join([*lines, "", "\\end\\", ""])
