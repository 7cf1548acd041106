"""Workloads that come with the trainer; each is imported, with its part of models/ and data/, when it is chosen."""

TASKS = {
    "har": f"{__name__}.har:HarTask",
    "seqrec": f"{__name__}.seqrec:SeqrecTask",
    "kgat": f"{__name__}.kgat:KgatTask",
    "speech": f"{__name__}.speech:SpeechTask",
    "tabular": f"{__name__}.tabular:TabularTask",
}
"""Maps names for `--task` to workloads; the first entry is the default."""
