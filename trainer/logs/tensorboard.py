"""TensorBoard, in the folder `logs` of the run directory."""

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import FileWriter, SummaryWriter
from torch.utils.tensorboard.summary import hparams, text

from trainer.config import shown
from trainer.logs.logger import LoggedRun, Logger, Record
from trainer.task import Picture

HYPERPARAMETERS_SUFFIX = ".hparams"


class TensorBoardLogger(Logger):
    """Curves and pictures, and at the end every flag beside the scores."""

    def start(self, run: LoggedRun) -> None:
        folder = run.directory / "logs"
        writer: Any = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else None)
        self._board: FileWriter = writer.file_writer
        for path in folder.glob("*" + HYPERPARAMETERS_SUFFIX):
            path.unlink()
        self._config = run.config

    def metrics(self, record: Record) -> None:
        # All in one event, which costs the training thread a third of an `add_scalar` each.
        self._board.add_summary(Summary(value=_scalars(record.values)), record.step)
        if record.event == "result":
            self._hyperparameters(record)

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        self._board.add_summary(Summary(value=[_image(name, picture) for name, picture in pictures.items()]), step)

    def text(self, name: str, content: str, step: int) -> None:
        """Shown under "Text"."""
        self._board.add_summary(text(name, content), step)

    def flush(self) -> None:
        """Hands everything to the operating system, so that a kill loses nothing from before this call."""
        self._board.flush()

    def end(self, state: str) -> None:
        self._board.close()

    def _hyperparameters(self, record: Record) -> None:
        """Every flag of a finished run by name, and its scores.

        TensorBoard's table of runs works out its columns: first the flags in which runs differ. The scores stand here
        once more under names that come first in the alphabet, since it shows the first few.
        """
        flags = {name: value for name, value in self._config.items() if value is not None}
        _, start, end = hparams(
            {name: value if type(value) in (int, float) else shown(value) for name, value in flags.items()}, {}
        )
        scores = _scalars({f"best/{name}": value for name, value in record.values.items()})
        # In a file of its own in the same folder: TensorBoard keeps the first flags that it reads of a run, so a run
        # that is trained on with other flags has to replace them.
        board = FileWriter(self._board.get_logdir(), filename_suffix=HYPERPARAMETERS_SUFFIX)
        board.add_summary(Summary(value=[*start.value, *end.value, *scores]), record.step)
        board.close()


def _scalars(values: Mapping[str, float]) -> list[Any]:
    return [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]


def _image(name: str, picture: Picture) -> Any:
    # Half the time of `add_image`, which goes through float32 and compresses harder: the training thread waits for it.
    png = io.BytesIO()
    Image.fromarray(picture).save(png, "PNG", compress_level=1)
    height, width, channels = picture.shape
    content = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png.getvalue())
    return Summary.Value(tag=name, image=content)
