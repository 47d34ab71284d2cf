"""What every command opens: the samples and a line over the model, in a run folder or in one that is thrown away."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from quantsieve.clipping import PERCENTILE
from quantsieve.data import Preprocess, Samples, SyntheticSamples, open_samples
from quantsieve.errors import RunFolderError, UsageError
from quantsieve.model.load import open_model
from quantsieve.plan import check_layers
from quantsieve.run.keys import content_key, model_key
from quantsieve.run.line import Line, Sources, input_specs
from quantsieve.run.memory import Memory, default_limit
from quantsieve.run.progress import Progress, Silent
from quantsieve.run.spec import Limits, Settings, run_spec
from quantsieve.run.store import Store
from quantsieve.targets.isolation import Isolated
from quantsieve.targets.ort import OrtCpu


def open_sources(
    path: Path,
    data: object,
    synthetic: int | None,
    calibration_data: object,
    preprocess: Preprocess | None,
    skip_bad: bool,
    class_names: Sequence[str] | None,
    seed: int,
) -> Sources:
    inputs = input_specs(open_model(path))
    if (data is None) == (synthetic is None):
        found = "both" if data is not None else "neither"
        raise UsageError("either data or a number of synthetic samples", found, "Give --data, or --synthetic N.")
    if synthetic is not None:
        return Sources(SyntheticSamples(inputs, synthetic, seed), None, True)

    def opened(source: object) -> Samples:
        return open_samples(source, inputs, preprocess=preprocess, skip_bad=skip_bad, class_names=class_names)

    return Sources(opened(data), None if calibration_data is None else opened(calibration_data))


def ranges_of(calibration_method: str, percentile: float | None) -> tuple[str, float]:
    """Both as `Settings` takes them. Raises UsageError for a percentile that the method does not take."""
    if percentile is not None and calibration_method != "percentile":
        raise UsageError(
            "a percentile with the calibration method percentile alone",
            f"{percentile} with {calibration_method}",
            "Choose that method, or give no percentile.",
        )
    return calibration_method, PERCENTILE if percentile is None else float(percentile)


@contextmanager
def open_line(
    folder: Path, path: Path, sources: Sources, settings: Settings, limits: Limits, progress: Progress | None
) -> Iterator[Line]:
    with (
        # Absolute: the store tells its own paths from relative ones by the folder that they begin with.
        Store.open(folder.absolute(), spec_of(path, sources, settings)) as store,
        Isolated(OrtCpu(threads=settings.threads), timeout_s=limits.limit_s) as target,
    ):
        memory = Memory(default_limit() if limits.memory_limit is None else limits.memory_limit)
        line = Line(store, path, sources, settings, target, limits.workers, progress or Silent(), memory)
        if settings.keep_float:
            check_layers(settings.keep_float, line.structure)  # wrong names are told before anything is measured
        line.notes += line.selected.notes
        yield line


def spec_of(path: Path, sources: Sources, settings: Settings) -> dict[str, object]:
    """What a run folder belongs to."""
    keys = {
        "model": model_key(path),
        "data": sources.samples.fingerprint(),
        "calibration_data": None if sources.calibration is None else sources.calibration.fingerprint(),
    }
    return run_spec(settings, keys)


@contextmanager
def beside(output: str | os.PathLike[str] | None, spec: Mapping[str, object]) -> Iterator[Path]:
    """A run folder next to the output, where the same work goes on after a kill; removed when it is done, or when it
    ends before anything is stored. Without an output one for temporary files."""
    if output is None:
        with scratch() as folder:
            yield folder
        return
    folder = Path(f"{Path(output)}.work-{content_key('scan', 1, spec, [])[:8]}")
    try:
        yield folder
    except RunFolderError:
        raise  # it may be at work for another process
    except BaseException:
        if not any(folder.glob("facts/*/*.json")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quantsieve-") as folder:
        yield Path(folder) / "run"
