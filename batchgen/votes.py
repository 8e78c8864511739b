"""Which answer most samples of a row gave."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from batchgen.data.rows import OutputRow


def voted(rows: Iterable[OutputRow]) -> list[OutputRow]:
    """The samples of one or several rows, all of them, with the vote and its share among the row's valid samples."""
    by_row: defaultdict[int, list[OutputRow]] = defaultdict(list)
    for row in rows:
        by_row[row.row].append(row)
    return [row for samples in by_row.values() for row in _voted(sorted(samples, key=lambda row: row.sample))]


def _voted(samples: list[OutputRow]) -> Iterable[OutputRow]:
    answers = [row.output.strip() for row in samples if row.status == "ok" and row.output is not None]
    if not answers:
        return samples
    vote, count = Counter(answers).most_common(1)[0]  # of equal counts, the one that was met first
    return (replace(row, vote=vote, vote_share=count / len(answers)) for row in samples)
