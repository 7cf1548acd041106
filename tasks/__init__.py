"""Built-in tasks, each imported only when it is chosen."""

TASKS = {
    "har": f"{__name__}.har:HarTask",
    "seqrec": f"{__name__}.seqrec:SeqrecTask",
    "kgat": f"{__name__}.kgat:KgatTask",
    "speech": f"{__name__}.speech:SpeechTask",
    "tabular": f"{__name__}.tabular:TabularTask",
}
"""Maps values of `--task` to classes, written as "module:class"; the first entry is the default."""
