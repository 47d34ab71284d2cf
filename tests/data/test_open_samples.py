import numpy as np
import pytest

from quantsieve.data import InputSpec, Preprocess, SyntheticSamples, open_samples
from quantsieve.errors import InputError

X = InputSpec("x", "float32", ("batch", 2))


def test_a_missing_path_is_refused_with_what_a_source_may_be(tmp_path):
    with pytest.raises(InputError, match=r"a folder of images, a \.npz.*nowhere"):
        open_samples(tmp_path / "nowhere", [X])


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(InputError, match=r"data\.csv"):
        open_samples(tmp_path / "data.csv", [X])


def test_a_number_is_no_source():
    with pytest.raises(InputError, match="object of type int"):
        open_samples(3, [X])


def test_arrays_come_in_a_dict_or_alone():
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    alone = open_samples(array, [X])
    assert len(alone) == 3
    assert alone.fingerprint() == open_samples({"x": array}, [X]).fingerprint()


def test_open_samples_pass_through():
    samples = SyntheticSamples([X], 2)
    assert open_samples(samples, [X]) is samples


def test_preprocessing_is_refused_where_it_would_change_nothing():
    with pytest.raises(InputError, match="folder of images to preprocess"):
        open_samples({"x": np.zeros((3, 2), np.float32)}, [X], preprocess=Preprocess(mean=(127.0,)))


def test_a_folder_is_opened_as_images(tmp_path, save_image, image_spec):
    save_image(tmp_path / "a.png")
    assert len(open_samples(str(tmp_path), [image_spec])) == 1
